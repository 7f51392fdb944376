"""The format of a recorded run, and its reader.

A recording is a gzip file of JSON lines: `zcat run.rec | head` shows it, the standard library reads
it anywhere, and a run that crashes leaves all that it wrote before. JSON rather than a binary
format because gzip makes the two equally small (token ids are the bulk of it) and a line can be
looked at. Line 1 is the header, an object: "format", "version", "commit", "device", "config" (all
of `InferenceConfig`, the KV pool as a number of blocks), "choices" (the rows of `Choices` that were
used; older recordings have none) and "shape" (`ModelShape`). Every other line is an array, in the
order in which things happened; times are microseconds:

    ["add", request id, priority, [prompt], {sampling parameters that are not the default},
        {what it had on another engine}]                       last entry only if it began there
    ["abort", request id]
    ["evict_all"]                             the engine was suspended and gave its KV cache back
    ["prefill_limit", tokens]                 beside decode rows, from the next launch on
    ["update", step, version, policy]         the weights are others from this plan on (version 3)
    ["launch", step, [checksum of each of PLAN_FIELDS], [prefill tokens, decode rows, KV tokens],
        [prepare, launch, when],              step null: nothing could be planned before a resolve
        [tokens found in the cache, blocks kept]]              last entry only if not [0, 0]
    ["resolve", step, [tokens that its rows yield], [how many each; null: one], error or null,
        [resolve, when],
        [[drafts of each row for its next step]]]              last entry only if there are any
    ["text_end", request id, reason, generated tokens]     an end that token ids alone do not tell
    ["device", [[step, start, end], ...]]                  where a timeline was kept
    ["end", {counters}]                                    last line; without it, truncated
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.errors import RecordingError
from megatron_async.lab.model_shape import ModelShape
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.text.structured_output import StructuredOutput

FORMAT = "megatron_async recording"
VERSION = 3
READ = (2, 3)
"""Versions that are read: 2 has no updates."""
PLAN_FIELDS = (
    "slots", "generations", "kv_at_most", "widths", "produces", "prefill", "block_updates",
)  # fmt: skip
"""What a plan is compared by. Padding is left out, so that a GPU's run replays anywhere."""
COUNTERS = (
    "steps", "generated_tokens", "prefill_tokens", "zombie_rows", "pauses", "evictions",
    "finished_requests", "failed_steps",
)  # fmt: skip
"""Keys of `engine.stats()` that a replay must reach too. (Requests that were refused are not
recorded, so failed ones are not among them.)"""

MOST_CHARACTERS = 256 << 20
"""Length of a line: gzip makes a file of a thousandth of that."""
DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""Errors of reading what no recorder has written."""
TEXT_ENDS = ("stop_word", "grammar", "error")
"""Ends that token ids alone do not tell; "error" is a tokenizer's or a grammar's."""


@dataclass(frozen=True)
class Added:
    """A request was queued."""

    request_id: int
    priority: int
    prompt: list[int]
    params: dict[str, Any]
    moved: dict[str, Any] | None = None
    """What it had on another engine (`MovedRequest`); None: it began here."""

    def sampling_params(self) -> SamplingParams:
        """The request's parameters.

        Raises:
            RecordingError: one of them is not known to this version.
        """
        _check_names(self.params, SamplingParams, "the sampling parameter")
        params = SamplingParams(**self.params)
        if params.logit_bias is not None:  # JSON's keys are strings
            params.logit_bias = {int(token): bias for token, bias in params.logit_bias.items()}
        if self.params.get("structured_output") is not None:
            params.structured_output = StructuredOutput(**self.params["structured_output"])
        return params


@dataclass(frozen=True)
class Aborted:
    """A request was aborted."""

    request_id: int


@dataclass(frozen=True)
class Launched:
    """A step was launched, or could not be (`step` None)."""

    step: int | None
    checksums: list[int]
    work: tuple[int, int, int]
    """Prefill tokens, decode rows (padding included) and KV tokens."""
    times_us: tuple[float, float, float]
    """CPU time of preparing and of launching, and when it was launched."""
    cached: tuple[int, int] = (0, 0)
    """Tokens that the requests which begin with this step found in the cache, and blocks that were
    kept for what they hold, without an owner, once it was planned: what a replay depends on besides
    the samples where blocks are shared."""


@dataclass(frozen=True)
class Resolved:
    """A step was booked."""

    step: int
    tokens: list[int]
    counts: list[int] | None
    """Tokens of each row of the plan; None: one each."""
    error: str | None
    times_us: tuple[float, float]
    """CPU time of resolving, and when it was done."""
    drafts: list[list[int]] | None = None
    """Drafts of each row of the plan for its next step, on which the widths of later steps depend;
    None: there are none."""


@dataclass(frozen=True)
class TextEnd:
    """A request's end by what its tokens say as text; `reason` is one of `TEXT_ENDS`."""

    request_id: int
    reason: str
    generated_tokens: int


@dataclass(frozen=True)
class EvictedAll:
    """Every running request was evicted."""


@dataclass(frozen=True)
class PrefillLimit:
    """Most prompt tokens of a step with decode rows, from the next launch on: the recorded run's
    clock said so (`InferenceConfig.target_tpot_ms`)."""

    tokens: int


@dataclass(frozen=True)
class Updated:
    """The weights were others from plan `step` on."""

    step: int
    version: str | int | None
    policy: str


Event = Added | Aborted | EvictedAll | PrefillLimit | Updated | Launched | Resolved | TextEnd


@dataclass
class Recording:
    """A run, as it was written."""

    config: InferenceConfig
    shape: ModelShape
    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    device_spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Step -> start and end on the device, where a timeline was kept."""
    counters: dict[str, float] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run was closed."""
        return self.counters is not None


def plan_checksums(plan: StepPlan) -> list[int]:
    """CRC-32 of each of `PLAN_FIELDS`, the same on every machine."""
    updates, states = plan.block_updates, plan.states
    rows = () if states is None else tuple(getattr(states, f.name) for f in fields(states))
    parts = (
        (plan.slots,),
        (plan.generations,),
        (plan.kv_at_most,),
        (plan.widths,),
        (plan.produces,),
        (plan.prefill_starts, plan.prefill_token_ids),
        (updates.slots, updates.indices, updates.blocks, *rows),
    )
    return [_checksum(*arrays) for arrays in parts]


def _checksum(*arrays: np.ndarray) -> int:
    value = 0
    for array in arrays:
        value = zlib.crc32(array.astype("<i8"), zlib.crc32(len(array).to_bytes(8, "little"), value))
    return value


def load_recording(path: str | Path, allow_truncated: bool = False) -> Recording:
    """Read a recording.

    Args:
        path: the file.
        allow_truncated: take one without an end too, up to where it breaks off.

    Raises:
        RecordingError: another kind of file, another version, or a truncated file.
        OSError: the file cannot be read.
    """
    lines = _lines(Path(path))
    recording = _parse_header(path, next(lines, None))
    number = 1
    for number, line in enumerate(lines, 2):
        if line is None or not line.endswith("\n"):
            break
        try:
            _parse(recording, json.loads(line))
        except DAMAGED as error:
            raise RecordingError(f"{path}: line {number} is damaged ({error}).") from error
    if not recording.is_complete and not allow_truncated:
        raise RecordingError(
            f"{path} has no end after line {number}: its run crashed, is still going on, or never "
            "closed its LLM or Recorder. With --allow-truncated (allow_truncated=True) what there "
            "is of it is taken."
        )
    return recording


def _lines(path: Path) -> Iterator[str | None]:
    """Lines of a gzip file; None where it breaks off."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        try:
            while line := file.readline(MOST_CHARACTERS):
                if len(line) == MOST_CHARACTERS:
                    raise zlib.error(f"a line has {len(line)} characters or more")
                yield line
        except EOFError:
            yield None
        except (gzip.BadGzipFile, UnicodeDecodeError, zlib.error) as error:
            raise RecordingError(
                f"{path} is not a recording, or damaged ({error}): recordings are written by "
                "`megatron-async generate --record` or lab.recorder.Recorder."
            ) from error


def _parse_header(path: str | Path, line: str | None) -> Recording:
    try:
        header = json.loads(line or "")
        kind, version = header["format"], header["version"]
    except DAMAGED:
        kind, version = None, None
    if kind != FORMAT:
        raise RecordingError(
            f"{path} is not a recording (its first line is no header): recordings are written by "
            "`megatron-async generate --record` or lab.recorder.Recorder."
        )
    if version not in READ:
        raise RecordingError(
            f"{path} has version {version}, but this program reads version {VERSION}: replay it "
            f"with the program that wrote it (commit {header.get('commit')})."
        )
    try:
        _check_names(header["config"], InferenceConfig, "the setting")
        _check_names(header["shape"], ModelShape, "the model's field")
        config = InferenceConfig(**header["config"])
        return Recording(config, ModelShape(**header["shape"]), header)
    except RecordingError:
        raise
    except DAMAGED as error:
        raise RecordingError(f"{path}: its header is damaged ({error}).") from error


def _check_names(values: dict[str, Any], owner: Any, what: str) -> None:
    known = {f.name for f in fields(owner)}
    for name in values:
        if name not in known:
            raise RecordingError(
                f"the recording uses {what} {name!r}, which this version does not have: replay it "
                "with the version that wrote it."
            )


def _parse(recording: Recording, record: list[Any]) -> None:
    kind, values = record[0], record[1:]
    if kind == "add":
        recording.events.append(Added(*values))
    elif kind == "abort":
        recording.events.append(Aborted(*values))
    elif kind == "evict_all":
        recording.events.append(EvictedAll(*values))
    elif kind == "prefill_limit":
        recording.events.append(PrefillLimit(*values))
    elif kind == "update":
        recording.events.append(Updated(*values))
    elif kind == "launch":
        step, checksums, work, times, *cached = values
        launched = Launched(step, checksums, tuple(work), tuple(times), *map(tuple, cached))
        recording.events.append(launched)
    elif kind == "resolve":
        step, tokens, counts, error, times, *drafts = values
        recording.events.append(Resolved(step, tokens, counts, error, tuple(times), *drafts))
    elif kind == "text_end":
        recording.events.append(TextEnd(*values))
    elif kind == "device":
        recording.device_spans = {step: (start, end) for step, start, end in values[0]}
    elif kind == "end":
        recording.counters = values[0]
    else:
        raise ValueError(f"{kind!r} is no kind of record")
