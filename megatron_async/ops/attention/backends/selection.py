"""Which prefill backend serves a step: the requested one, or the fastest of those available.

Backends are timed once for a GPU and a shape (`choices.py`), in a CUDA graph and on a typical shape
of each class of steps: whole chunks, limited by the matrix units; short chunks after a long
sequence, limited by the number of programs that share the sequence; and short prompts, limited by
the launch; each of them alone and beside decode rows.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import torch
from tqdm import tqdm

from megatron_async.choices import Choices, Fact, Question, everywhere
from megatron_async.devices import Device
from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    BackendUnavailable,
    PrefillBackend,
    PrefillRows,
    TorchPrefill,
)
from megatron_async.ops.attention.backends.flash_attn import (
    FlashAttention3Prefill,
    FlashAttention4Prefill,
)
from megatron_async.ops.attention.backends.own_kernel import TritonPrefill, WarpgroupPrefill
from megatron_async.ops.attention.decode_attention import DecodeWorkspace, paged_decode_attention
from megatron_async.ops.attention.narrow_cache import NARROW, scales_of

DECODE_ROWS = 32
DECODE_KEYS = 512
"""Decode rows of a mixed step, and keys of each: some 28 of 450 with 48 arrivals a second on the 8B
shape."""


@dataclass(frozen=True)
class StepClass:
    """A class of steps, and the rows that are timed for it."""

    name: str
    least_query: int
    """Steps whose longest chunk has at least so many tokens belong to it."""
    query: int
    kv: int
    decode_rows: int = 0
    """Decode rows of `DECODE_KEYS` keys; 0: steps without decode rows belong to it."""


STEP_CLASSES = (
    StepClass("chunks", 512, 2048, 2048),
    StepClass("short chunks", 192, 256, 2048),
    StepClass("short prompts", 0, 128, 128),
    StepClass("chunks", 512, 2048, 2048, DECODE_ROWS),
    StepClass("short chunks", 192, 256, 2048, DECODE_ROWS),
    StepClass("short prompts", 0, 128, 128, DECODE_ROWS),
)
"""By falling `least_query`: the first that fits counts. A captured step may also have few tokens
over a long sequence, but the host does not know; short prompts are the usual case. Steps with
decode rows have classes of their own, as some backends leave room for their attention beside the
prompts': with programs that fill a processor a mixed step of the 8B shape is up to 2.5 % longer
(docs/records/prefill_attention.md)."""


@dataclass(frozen=True)
class PrefillChoice:
    """A backend for each of `STEP_CLASSES`.

    Attributes:
        backends: in the order of the classes.
        microseconds: of a layer, by class and backend; 0 if it could not be timed. Empty where
            there was one backend alone, or a rule chose.
        dropped: backends that were at hand but failed when they were timed, and why.
        source: where the choice comes from, in words (`Choices.source`); "" if there was none.
    """

    backends: tuple[PrefillBackend, ...]
    microseconds: tuple[dict[str, float], ...] = ()
    dropped: tuple[str, ...] = ()
    source: str = ""

    @classmethod
    def of_one(cls, backend: PrefillBackend) -> PrefillChoice:
        """A choice of this backend for all steps."""
        return cls((backend,) * len(STEP_CLASSES))

    @property
    def captures(self) -> bool:
        """Whether steps with prefill chunks can be captured."""
        return all(backend.captures for backend in self.backends)

    def pick(self, max_query_length: int, has_decode_rows: bool) -> PrefillBackend:
        """The backend for a step whose longest chunk has at most so many tokens."""
        for step_class, backend in zip(STEP_CLASSES, self.backends, strict=True):
            fits = max_query_length >= step_class.least_query
            if fits and has_decode_rows == (step_class.decode_rows > 0):
                return backend
        raise AssertionError("the last class of each kind takes every step")

    def __str__(self) -> str:
        names = [backend.name for backend in self.backends]
        told: dict[bool, list[str]] = {False: [], True: []}
        all_times = self.microseconds or ({},) * len(names)
        for step_class, name, times in zip(STEP_CLASSES, names, all_times, strict=True):
            own = f"{times[name]:.0f} us a layer" if times.get(name) else "not timed"
            others = ", ".join(f"{o} {t:.0f}" for o, t in sorted(times.items()) if o != name)
            text = f"{step_class.name} {name} ({'; '.join(filter(None, (own, others)))})"
            told[step_class.decode_rows > 0].append(text)
        parts = ["prefill " + ", ".join(told[False]), "beside decode rows " + ", ".join(told[True])]
        if not self.microseconds and len({*names}) == 1:
            parts = [f"prefill {names[0]}"]
        return "attention: " + "; ".join(filter(None, (*parts, *self.dropped, self.source)))


CALLS = 4
"""Layers in a measured graph."""
REPEATS = 5
MOST_BYTES = 128 << 20
"""Bytes of the caches of a measured graph, if one layer's are not larger."""


@torch.inference_mode()
def time_backend(
    backend: PrefillBackend,
    shape: AttentionShape,
    device: Device,
    chunks: Sequence[tuple[int, int]],
    decode_rows: int = 0,
) -> float:
    """Median device time of a layer, microseconds, on `chunks` of (query length, KV length), cut to
    the longest sequence, and beside `decode_rows` of `DECODE_KEYS` keys. The device is a GPU; a CPU
    will do for a backend that is not captured, without decode rows."""
    layers = layers_of_step(backend, shape, chunks, decode_rows)
    device.fence()
    device.compute.launch(layers)  # kernels are compiled
    replay = device.capture(layers).replay if backend.captures else layers
    device.compute.launch(replay)
    times = []
    for _ in range(REPEATS):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        device.compute.launch(replay)
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / CALLS)
    return statistics.median(times)


def layers_of_step(
    backend: PrefillBackend,
    shape: AttentionShape,
    chunks: Sequence[tuple[int, int]],
    decode_rows: int = 0,
    decode_keys: int = DECODE_KEYS,
) -> Callable[[], None]:
    """A call that enqueues the attention of `CALLS` layers of one step, on random numbers, as
    `time_backend` describes it. What a step does once is done here."""
    where, size = shape.device, shape.block_size
    longest = shape.longest_sequence
    cut = [(min(query, kv, longest), min(kv, longest)) for query, kv in chunks]
    lengths = [min(decode_keys, longest)] * decode_rows + [kv for _, kv in cut]
    starts = list(accumulate((query for query, _ in cut), initial=decode_rows))
    blocks = [-(-length // size) for length in lengths]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, own in enumerate(torch.randperm(sum(blocks)).split(blocks)):
        tables[row, : len(own)] = own
    cells = (sum(blocks), size, shape.kv_heads, shape.dim)
    # A cache for each layer, unless they would be large: layers find nothing in the second cache
    # that decode rows of an earlier one have read.
    dtype = NARROW if shape.is_narrow else shape.dtype
    cell_bytes = 2 * math.prod(cells) * dtype.itemsize
    count = min(CALLS, max(MOST_BYTES // cell_bytes, 1)) if decode_rows else 1
    caches = torch.randn((count, 2, *cells), dtype=shape.dtype, device=where).to(dtype)
    scales = None
    if shape.is_narrow:
        ones = torch.ones(shape.kv_heads, device=where)
        scales = scales_of(ones, ones)
    query = torch.randn(starts[-1], shape.heads, shape.dim, dtype=shape.dtype, device=where)
    block_tables = tables.to(where)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device=where)  # sync-ok: at the start
    first_tokens = torch.tensor(starts, dtype=torch.int32, device=where)  # sync-ok: at the start
    queries = [asked for asked, _ in cut]
    backend.begin_step(
        PrefillRows(
            block_tables[decode_rows:],
            kv_lengths[decode_rows:],
            first_tokens,
            sum(queries),
            max(queries),
            max(kv for _, kv in cut),
            tuple(cut),
            decode_rows,
        )
    )
    sinks = torch.zeros(shape.heads, device=where) if shape.has_sinks else None
    workspace = None
    if decode_rows:
        heads, parts = (shape.heads, shape.kv_heads, shape.dim), (shape.part, longest, shape.window)
        workspace = DecodeWorkspace(decode_rows, *heads, where, 1, *parts)
        workspace.schedule.update(kv_lengths[:decode_rows])

    def layers() -> None:
        for layer in range(CALLS):
            keys, values = caches[layer % count]
            out = torch.empty_like(query)
            backend.attend(query, keys, values, shape.dim**-0.5, out, scales, sinks)
            if workspace is not None:
                # As `GpuPagedAttention` does.
                paged_decode_attention(
                    query[:decode_rows],
                    keys,
                    values,
                    block_tables[:decode_rows],
                    shape.dim**-0.5,
                    workspace,
                    out[:decode_rows],
                    is_settled=True,
                    is_beside=backend.lets_others_start,
                    scales=scales,
                    sinks=sinks,
                    softcap=shape.softcap,
                )

    return layers


logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[AttentionShape], PrefillBackend]] = {
    "triton": TritonPrefill,
    "warpgroup": WarpgroupPrefill,
    "flash_attn_4": FlashAttention4Prefill,
    "flash_attn_3": FlashAttention3Prefill,
    "torch": TorchPrefill,
}
"""By name in `InferenceConfig.attention_backend`."""
CANDIDATES = ("triton", "warpgroup", "flash_attn_4", "flash_attn_3")
"""Backends to choose from; torch is a reference, and never the fastest."""

WORTH = 0.95
"""Another backend is chosen if it takes at most this share of the time of the first one in
`CANDIDATES`. Otherwise noise would choose where two are as fast: another one at each start, and
with it other roundings."""


class PrefillRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a choice of backends, in the order of `STEP_CLASSES`."""

    backends: list[str]
    us: list[dict[str, float]] = []
    """Microseconds of a layer, by class and backend; none by rule."""


def question_of(shape: AttentionShape, at_hand: Sequence[str]) -> Question[PrefillRow]:
    """What decides about backends, and the rule: the first of `CANDIDATES` for all steps."""
    count = len(STEP_CLASSES)

    def check(row: PrefillRow) -> None:
        if len(row.backends) != count or len(row.us) not in (0, count):
            raise ValueError(f"it names {len(row.backends)} backends for {count} classes of steps")
        if unknown := {*row.backends}.union(*row.us) - {*at_hand}:
            raise ValueError(f"it names the backends {', '.join(sorted(unknown))}")

    facts: dict[str, Fact] = {
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.dim,
        "block_size": shape.block_size,
        "longest": min(shape.longest_sequence, max(each.kv for each in STEP_CLASSES)),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "part": shape.part,
        "backends": list(at_hand),
    }
    rules = {
        "window": shape.window,
        "softcap": shape.softcap,
        "sinks": shape.has_sinks,
        "fp8_cache": shape.is_narrow,
    }
    facts |= {name: rule for name, rule in rules.items() if rule}
    return Question("prefill attention", facts, PrefillRow([CANDIDATES[0]] * count), check)


def choose_prefill(
    name: str | None, shape: AttentionShape, device: Device, choices: Choices
) -> PrefillChoice:
    """The backends of an engine's prefill steps.

    Args:
        name: of `BACKENDS`, for every step; None chooses where there is more than one candidate.
        shape: of the engine's attention.
        device: a GPU.
        choices: of the engine.

    Raises:
        BackendUnavailable: the requested backend is not supported; names the reason and the remedy.
        ConfigurationError: there is no backend of this name.
    """
    if name is not None:
        if name not in BACKENDS:
            raise ConfigurationError(
                f"attention_backend={name!r} is unknown: use one of {', '.join(BACKENDS)}, or None."
            )
        return PrefillChoice.of_one(BACKENDS[name](shape))
    at_hand: dict[str, PrefillBackend] = {}
    # In parts of one length there are our two alone, whose bits are equal: the fastest may serve.
    for candidate in CANDIDATES:
        try:
            at_hand[candidate] = BACKENDS[candidate](shape)
        except BackendUnavailable as reason:
            logger.debug("%s", reason)
    at_hand = {name: at_hand[name] for name in everywhere("attention backends", [*at_hand])}
    if len(at_hand) == 1:
        return PrefillChoice.of_one(*at_hand.values())
    question = question_of(shape, [*at_hand])
    row, dropped = choices.find(question), tuple[str, ...]()
    if row is None:
        times, dropped = _measure(at_hand, shape, device, choices.progress)
        timed = everywhere("timed backends", [*times[0]])
        times = [{name: round(each[name], 1) for name in timed} for each in times]
        mine = PrefillRow([_fastest(each) for each in times], times)
        row = choices.keep(question, mine, is_sound=len(timed) == len(at_hand))
    backends = tuple(at_hand[name] for name in row.backends)
    return PrefillChoice(backends, tuple(row.us), dropped, choices.used[question.kind][1])


def _fastest(times: dict[str, float]) -> str:
    """The fastest backend by its microseconds (`WORTH`)."""
    first = CANDIDATES[0]
    fastest = min(times, key=lambda name: times[name], default=first)
    return fastest if times.get(fastest, 0.0) <= WORTH * times.get(first, math.inf) else first


def _measure(
    backends: dict[str, PrefillBackend], shape: AttentionShape, device: Device, progress: bool
) -> tuple[list[dict[str, float]], tuple[str, ...]]:
    """Microseconds a layer by class and backend, and what failed. If the first backend cannot be
    timed it serves all steps: a measurement is no reason to fail."""
    times: list[dict[str, float]] = [{} for _ in STEP_CLASSES]
    dropped: list[str] = []
    bar = tqdm(backends.items(), desc="timing attention", unit="backend", leave=False,
               disable=None if progress else True)  # fmt: skip
    for name, backend in bar:
        try:
            found = [
                time_backend(backend, shape, device, [(c.query, c.kv)], c.decode_rows)
                for c in STEP_CLASSES
            ]
        except Exception as error:
            logger.warning("attention backend %s could not be timed", name, exc_info=error)
            why = f"({type(error).__name__}: {error})"
            if name == CANDIDATES[0]:
                return [{name: 0.0} for _ in STEP_CLASSES], (f"nothing was timed {why}",)
            dropped.append(f"{name} failed {why}")
            continue
        for by_name, microseconds in zip(times, found, strict=True):
            by_name[name] = microseconds
    return times, tuple(dropped)
