"""Which prefill backend serves a step: the requested one, or the fastest of those available.

Backends are timed once, when an engine starts, in a CUDA graph and on a typical shape of each class
of steps: whole chunks, limited by the matrix units; short chunks after a long sequence, limited by
the number of programs that share the sequence; and short prompts, limited by the launch.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_async.devices import Device
from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    BackendUnavailable,
    PrefillBackend,
    PrefillRows,
)
from megatron_async.ops.attention.backends.flash_attn_3 import FlashAttention3Prefill
from megatron_async.ops.attention.backends.flash_attn_4 import FlashAttention4Prefill
from megatron_async.ops.attention.backends.torch_backend import TorchPrefill
from megatron_async.ops.attention.backends.triton_backend import TritonPrefill
from megatron_async.ops.attention.backends.warpgroup_backend import WarpgroupPrefill

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
"""Another backend is chosen if it takes at most so much of the time of the first one in
`CANDIDATES`. Otherwise noise would choose where two are as fast: another one at each start, and
with it other roundings. And beside the first one decode rows run at the same time (`is_beside` of
`ops/attention/decode_attention.py`): steps of 256 to 2,048 tokens of short prompts take 0.5 to
2.5 % less with it on the 8B shape, though warpgroup alone is as fast on them."""
CALLS = 4
"""Layers in a measured graph."""
REPEATS = 5


@dataclass(frozen=True)
class StepClass:
    """A class of steps and the one row that is timed for it."""

    name: str
    least_query: int
    """Steps whose longest chunk has at least so many tokens belong to it."""
    query: int
    kv: int


STEP_CLASSES = (
    StepClass("chunks", 512, 2048, 2048),
    StepClass("short chunks", 192, 256, 2048),
    StepClass("short prompts", 0, 128, 128),
)
"""By falling `least_query`: the first that fits counts. A captured step may also have few tokens
over a long sequence, but the host does not know; short prompts are the usual case."""


@dataclass(frozen=True)
class PrefillChoice:
    """A backend for each of `STEP_CLASSES`.

    Attributes:
        backends: in the order of the classes.
        microseconds: of a layer, by class and backend; empty where nothing was timed.
        dropped: backends that were at hand but failed when they were timed, and why.
    """

    backends: tuple[PrefillBackend, ...]
    microseconds: tuple[dict[str, float], ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def captures(self) -> bool:
        """Whether steps with prefill chunks can be captured."""
        return all(backend.captures for backend in self.backends)

    def pick(self, max_query_length: int) -> PrefillBackend:
        """The backend for a step whose longest chunk has at most so many tokens."""
        for step_class, backend in zip(STEP_CLASSES, self.backends, strict=True):
            if max_query_length >= step_class.least_query:
                return backend
        raise AssertionError("the last class takes every step")

    def __str__(self) -> str:
        names = [backend.name for backend in self.backends]
        if not self.microseconds:
            text = f"prefill {names[0]}"
        else:
            parts = []
            for step_class, name, times in zip(STEP_CLASSES, names, self.microseconds, strict=True):
                others = [f"{o} {t:.0f}" for o, t in sorted(times.items()) if o != name]
                parts.append(
                    f"{step_class.name} {name} ({times[name]:.0f} us a layer; {', '.join(others)})"
                )
            text = "prefill " + ", ".join(parts)
        return "attention: " + "; ".join((text, *self.dropped))


_measured: dict[AttentionShape, tuple[tuple[dict[str, float], ...], tuple[str, ...]]] = {}
"""Times of this process, by shape (which names the device)."""


def choose_prefill(
    name: str | None,
    shape: AttentionShape,
    device: Device,
    agree_on_least: Callable[[int], int] = int,
) -> PrefillChoice:
    """The backends of an engine's prefill steps.

    Args:
        name: of `BACKENDS`, for every step; None chooses by measurement where there is more than
            one candidate.
        shape: of the engine's attention.
        device: a GPU.
        agree_on_least: gives the least of a number over all ranks of the model.

    Raises:
        BackendUnavailable: the requested backend is not supported; names the reason and the remedy.
        ConfigurationError: there is no backend of this name.
    """
    if name is not None:
        if name not in BACKENDS:
            raise ConfigurationError(
                f"attention_backend={name!r} is unknown: use one of {', '.join(BACKENDS)}, or None."
            )
        return PrefillChoice((BACKENDS[name](shape),) * len(STEP_CLASSES))
    at_hand: dict[str, PrefillBackend] = {}
    for candidate in CANDIDATES:
        try:
            at_hand[candidate] = BACKENDS[candidate](shape)
        except BackendUnavailable as reason:
            logger.debug("%s", reason)
    # Ranks of one model capture the same steps, so they choose from what all of them have.
    at_hand = {
        candidate: at_hand[candidate]
        for candidate in CANDIDATES
        if agree_on_least(int(candidate in at_hand))
    }
    if len(at_hand) == 1:
        return PrefillChoice(tuple(at_hand.values()) * len(STEP_CLASSES))
    if shape not in _measured:
        _measured[shape] = _measure(at_hand, shape, device)
    times, dropped = _measured[shape]
    backends = tuple(at_hand[_agreed_fastest(by_name, agree_on_least)] for by_name in times)
    return PrefillChoice(backends, times, dropped)


def _agreed_fastest(times: dict[str, float], agree_on_least: Callable[[int], int]) -> str:
    """The fastest backend by its microseconds (`WORTH`); where ranks of one model differ, the first
    in `CANDIDATES` of those that they name, or triton if it failed on one of them."""
    fastest = min(times, key=lambda name: times[name])
    if times[fastest] > WORTH * times[CANDIDATES[0]]:
        fastest = CANDIDATES[0]
    wanted = CANDIDATES[agree_on_least(CANDIDATES.index(fastest))]
    everywhere = agree_on_least(int(wanted in times))
    return wanted if everywhere else CANDIDATES[0]


def _measure(
    backends: dict[str, PrefillBackend], shape: AttentionShape, device: Device
) -> tuple[tuple[dict[str, float], ...], tuple[str, ...]]:
    """Microseconds a layer by class and backend, and what failed."""
    times: tuple[dict[str, float], ...] = tuple({} for _ in STEP_CLASSES)
    dropped: list[str] = []
    for name, backend in backends.items():
        try:
            found = [time_backend(backend, shape, device, [(c.query, c.kv)]) for c in STEP_CLASSES]
        except Exception as error:
            # An optional package that does not run here is no reason to fail: ours always runs.
            if name == CANDIDATES[0]:
                raise
            logger.warning("attention backend %s failed and is left out", name, exc_info=error)
            dropped.append(f"{name} failed ({type(error).__name__}: {error})")
            continue
        for by_name, microseconds in zip(times, found, strict=True):
            by_name[name] = microseconds
    return times, tuple(dropped)


@torch.inference_mode()
def time_backend(
    backend: PrefillBackend,
    shape: AttentionShape,
    device: Device,
    chunks: Sequence[tuple[int, int]],
) -> float:
    """Median device time of a layer, microseconds.

    Args:
        backend: what is timed.
        shape: of the attention.
        device: a GPU; or a CPU, with a backend that is not captured.
        chunks: (query length, KV length) of each row, cut to the longest sequence.
    """
    layers = layers_of_step(backend, shape, chunks)
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
    backend: PrefillBackend, shape: AttentionShape, chunks: Sequence[tuple[int, int]]
) -> Callable[[], None]:
    """A call that enqueues the attention of `CALLS` layers of one step, on random numbers. What a
    step does once is done here.

    Args:
        backend: what attends.
        shape: of the attention.
        chunks: (query length, KV length) of each row, cut to the longest sequence.
    """
    where, dtype = shape.device, shape.dtype
    lengths = []
    for query_length, kv_length in chunks:
        kv_length = min(kv_length, shape.longest_sequence)
        lengths.append((min(query_length, kv_length), kv_length))
    queries, kv_lengths = zip(*lengths, strict=True)
    rows, blocks = len(lengths), -(-max(kv_lengths) // shape.block_size)
    cells = (rows * blocks, shape.block_size, shape.kv_heads, shape.dim)
    key_cache = torch.randn(cells, dtype=dtype, device=where)
    value_cache = torch.randn(cells, dtype=dtype, device=where)
    query = torch.randn(sum(queries), shape.heads, shape.dim, dtype=dtype, device=where)
    starts = [0, *accumulate(queries)]
    prefill_rows = PrefillRows(
        torch.randperm(rows * blocks, device=where).int().view(rows, blocks),
        torch.tensor(kv_lengths, dtype=torch.int32, device=where),  # sync-ok: at the start
        torch.tensor(starts, dtype=torch.int32, device=where),  # sync-ok: at the start
        sum(queries),
        max(queries),
        max(kv_lengths),
        tuple(lengths),
    )

    backend.begin_step(prefill_rows)

    def layers() -> None:
        for _ in range(CALLS):
            backend.attend(query, key_cache, value_cache, shape.dim**-0.5)

    return layers
