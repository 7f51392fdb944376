"""How long a device takes for a step, in virtual time: a model of few numbers, and built-in ones.

A step reads the weights once, multiplies them with all its tokens, and reads the keys and values
of its rows. So its time is taken as

    tokens(T) + prefill * P + decode * R + kv * K

with P prefill tokens, R query tokens of decode rows (one a row, or with speculation its width), T =
P + R (padding included), K tokens of KV cache read, and `tokens` linear between given points. So a
row of w tokens is taken to cost what w rows cost, but for the keys, which are read once. A fit of a
recording has one point: a + b P + c R + d K.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_async.errors import ConfigurationError
from megatron_async.ops.batch_dimensions import BatchDimensions

if TYPE_CHECKING:
    from megatron_async.planning.step_plan import StepPlan

Work = tuple[int, int, int]
"""Work of a step: prefill tokens, query tokens of decode rows (padding included) and KV tokens."""
NAMES = ("prompt tokens", "decode tokens", "KV tokens")


def work_of(plan: StepPlan) -> Work:
    """The work of a step, as recordings tell it."""
    return *plan.work_tokens, int(plan.kv_at_most.sum())


class Reach(NamedTuple):
    """The least and the most work of one step."""

    least: Work
    most: Work

    @classmethod
    def of(cls, steps: Sequence[Work]) -> Reach:
        """What these steps reach, each kind of work by itself."""
        least, most = zip(*((min(kind), max(kind)) for kind in zip(*steps)))
        return cls(least, most)

    @property
    def varies(self) -> tuple[bool, ...]:
        """Whether steps with more and with less of a kind of work were seen: only then is known
        what it costs."""
        return tuple(most > least for least, most in zip(*self))

    def __str__(self) -> str:
        return ", ".join(f"{most:,} {name}" for most, name in zip(self.most, NAMES)) + " in a step"

    def exceeded_by(self, most: Work) -> list[str]:
        """What a simulation did that no recorded step did."""
        return [
            f"{more:,} {name} (recorded: {seen:,}"
            + (")" if varies else ", always, so more of them are taken to cost nothing)")
            for more, name, seen, varies in zip(most, NAMES, self.most, self.varies)
            if more > seen
        ]


@dataclass(frozen=True)
class CpuTimes:
    """The host's time by stage, microseconds; waiting for the device is not counted.

    The defaults are those of an H200's host (docs/records/whole_steps.md, "Steady decode",
    lookahead 1).
    """

    prepare_us: float = 28.0
    """`prepare_step`."""
    launch_us: float = 84.0
    """Bookkeeping copy and launch of a captured step; measured while each step had a copy."""
    resolve_us: float = 38.0
    """`update_requests` and `emit`."""
    eager_launch_us: float = 0.0
    """Launching the kernels of a step that is not captured, one by one."""
    add_us: float = 60.0
    """Taking in one request."""
    turnaround_us: float = 40.0
    """From the end of a step's last kernel to the host's going on: the event, and the waking of the
    thread; measured while samples came by a copy."""


@dataclass(frozen=True)
class DeviceTimes:
    """Microseconds of a step on a device.

    Raises:
        ConfigurationError: no points, or points that are not in order of tokens.
    """

    tokens_us: tuple[tuple[float, float], ...]
    """(tokens, microseconds), ascending; beyond the ends the first and last slopes go on, and
    before the first point its time stays."""
    prefill_us: float = 0.0
    """More for each prefill token."""
    decode_us: float = 0.0
    """More for each query token of a decode row."""
    kv_us: float = 0.0
    """For each token of KV cache that is read."""
    draft_us: float = 0.0
    """More for each step, where steps draft."""
    captures_graphs: bool = False
    """Whether decode steps are padded to captured shapes."""
    captured_prefill_tokens: int = 0
    """Mixed steps of more prefill tokens are launched kernel by kernel."""

    def __post_init__(self) -> None:
        counts = [tokens for tokens, _ in self.tokens_us]
        if not counts or counts != sorted(set(counts)):
            raise ConfigurationError(
                f"tokens_us={self.tokens_us!r} must be points in ascending order of tokens."
            )

    def time_us(self, prefill_tokens: int, decode_tokens: int, kv_tokens: int) -> float:
        """Time of a step of so many tokens, padding included; never negative."""
        total = self._interpolate(prefill_tokens + decode_tokens) + self.draft_us
        total += self.prefill_us * prefill_tokens + self.decode_us * decode_tokens
        return max(total + self.kv_us * kv_tokens, 0.0)

    def is_eager(self, dims: BatchDimensions) -> bool:
        """Whether the kernels of such a step are launched one by one."""
        return self.captures_graphs and not dims.is_captured

    def _interpolate(self, tokens: float) -> float:
        points = self.tokens_us
        if len(points) == 1 or tokens <= points[0][0]:
            return points[0][1]
        right = min(bisect_right(points, (tokens, float("inf"))), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)


@dataclass(frozen=True)
class Machine:
    """A device and its host, as the simulator sees them."""

    device: DeviceTimes
    cpu: CpuTimes
    source: str
    """Where the numbers come from."""
    reach: Reach | None = None
    """The steps that a recording has seen; None: the figures were measured over a range."""


_KV_US_PER_BYTE = (4888.0 - 3816.0) / 32_640 / 131_072
"""What 32k tokens of context add to a decode step of the 8B shape: decode_8b_32k.json beside
decode_8b.json."""
_MEAN_CONTEXT = 190
"""Tokens, of the decode records."""


def _without_kv(
    points: tuple[tuple[int, float], ...], kv_us: float, context: int = _MEAN_CONTEXT
) -> tuple[tuple[float, float], ...]:
    return tuple((rows, us - kv_us * rows * context) for rows, us in points)


def _h200(
    decode: tuple[tuple[int, float], ...],
    mixed: tuple[tuple[int, float], ...],
    kv_bytes: int,
    captured_prefill_tokens: int,
    eager_launch_us: float,
) -> Machine:
    kv_us = _KV_US_PER_BYTE * kv_bytes
    device = DeviceTimes(
        tokens_us=_without_kv(decode, kv_us) + mixed,
        kv_us=kv_us,
        captures_graphs=True,
        captured_prefill_tokens=captured_prefill_tokens,
    )
    source = "one H200, bfloat16, docs/performance.md"
    return Machine(device, CpuTimes(eager_launch_us=eager_launch_us), source)


# Decode: docs/performance.md and docs/records/whole_steps.md ("Late launches on GPUs"), 2026-11-26
# and 27; a step takes what its kernels take. One row has kernels of its own, and 2 to 16 rows share
# a tile (ops/linear/tile.py), so 2 rows take what 16 were measured to. Mixed: the time to
# the first token of one prompt of 2048 tokens, less the host's 0.2 ms. Eager launches and captured
# sizes: docs/records/whole_steps.md, "Between steps, and churn".
MACHINES: dict[str, Machine] = {
    "h200:smollm2-135m": _h200(
        decode=((1, 326.0), (2, 430.0), (16, 430.0), (64, 597.0), (256, 926.0)),
        mixed=((2048, 2790.0),),
        kv_bytes=23_040,
        captured_prefill_tokens=2048,
        eager_launch_us=8200.0,
    ),
    "h200:llama-3.1-8b": _h200(
        decode=(
            (1, 3816.0),
            (2, 4200.0),
            (16, 4200.0),
            (64, 4663.0),
            (96, 5480.0),
            (128, 5812.0),
            (192, 7668.0),
            (256, 9019.0),
        ),
        mixed=((2048, 46480.0),),
        kv_bytes=131_072,
        captured_prefill_tokens=2048,
        eager_launch_us=8800.0,
    ),
    # Uniform routing; docs/records/hybrid.md: decode behind prompts of 128 tokens, a
    # step of 8,192 tokens of prompts of 32k; all captured. Reading states is part of decode. The
    # time of eager launches is the 8B shape's: this model's was not measured.
    "h200:nemotron-3-nano-30b": _h200(
        decode=((1, 2662.0), (16, 9287.0), (64, 16070.0), (256, 21470.0)),
        mixed=((8192, 158000.0),),
        kv_bytes=6144,
        captured_prefill_tokens=8192,
        eager_launch_us=8800.0,
    ),
}
"""Built-in figures by name; none of them was fitted to the records of arrivals at random."""
