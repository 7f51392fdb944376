"""`StepCosts`: what a step with decode rows takes, as a sum of its kinds of work, learned from
booked steps.

A linear fit of the last steps, whose tokens have two prices: few tokens cost little, because the
weights have to be read all the same, and tokens beyond `BALANCE` cost their products. Sarathi-Serve
(OSDI 2024) bounds the time between tokens by a token budget that is profiled beforehand; here the
running engine profiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.planning.step_plan import StepPlan

KEPT = 128
"""Steps of each kind, with and without prompt tokens, that a fit looks at."""
FIT_EVERY = 16
"""Steps between two fits. A fit takes about 0.1 ms of the CPU."""
LEAST = 8
"""Mixed steps before the first fit."""
OUTLIER = 4.0
"""Steps farther from a fit than so many times the median distance are left out of the next: a
garbage collection, or another process on the engine's core."""
BALANCE = 256
"""Tokens that a GPU multiplies in the time in which it reads the weights: its FLOPs over its bytes
a second, 200 to 300 in 16 bits."""
_SCALES = np.array([1.0, 256.0, 64.0, 1e4, 1e6, 256.0])
"""Typical sizes of `StepWork`, so that numbers of one order meet in the fit."""
_RIDGE = 1e-4
"""Weight of the prior (no cost), where steps do not tell: kinds of work that never varied."""


class StepWork(NamedTuple):
    """The work of a step, padding included."""

    steps: int
    """1: what each step takes."""
    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int
    """Read by decode rows and prompts."""
    pairs: int
    """Pairs of a prompt token and a token before it: the work of attention over long prompts."""

    @property
    def kinds(self) -> tuple[int, ...]:
        """The fields, and the tokens beyond `BALANCE`."""
        return *self, max(self.prefill_tokens + self.decode_tokens - BALANCE, 0)

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """The work of a plan."""
        pairs = 0
        if not plan.dims.is_decode_only:
            lengths = np.diff(plan.prefill_starts).astype(np.int64)
            pairs = int(lengths @ plan.kv_at_most[plan.num_decode :])
        return cls(1, *plan.work_tokens, int(plan.kv_at_most.sum()), pairs)


class StepCosts:
    """Keeps the times of steps and fits them."""

    def __init__(self) -> None:
        self._kept = {kind: np.zeros((KEPT, len(_SCALES) + 1)) for kind in (False, True)}
        self._counts = {False: 0, True: 0}
        self._since_fit = 0
        self._costs: NDArray[np.float64] | None = None

    @property
    def most_seen(self) -> int:
        """Most prefill tokens of the steps that are kept; 0: none."""
        return int(self._kept[True][:, 1].max())

    def add(self, work: StepWork, time_us: float) -> None:
        """A step with decode rows took so many microseconds."""
        kind = work.prefill_tokens > 0
        self._kept[kind][self._counts[kind] % KEPT] = *work.kinds, time_us
        self._counts[kind] += 1
        self._since_fit += 1
        due = FIT_EVERY if self._costs is not None else 1
        if self._counts[True] >= LEAST and self._since_fit >= due:
            self._fit()

    def prefill_tokens_in(self, time_us: float, work: StepWork, position: int) -> float | None:
        """How many prompt tokens a step may have.

        Args:
            time_us: that it may take.
            work: of the step without them.
            position: of the prompt at which they begin: tokens before them.

        Returns:
            their number, below 0 where the step takes longer without any; None: not known yet.
        """
        if self._costs is None:
            return None
        left_us = time_us - float(self._costs @ work.kinds)
        low = max(float(self._costs[1] + self._costs[4] * position), 1e-6)
        high = low + float(self._costs[5])
        few = max(BALANCE - work.decode_tokens, 0)
        return left_us / low if left_us < few * low else few + (left_us - few * low) / high

    def _fit(self) -> None:
        self._since_fit = 0
        rows = np.concatenate([self._kept[kind][: self._counts[kind]] for kind in (False, True)])
        work, times = rows[:, :-1] / _SCALES, rows[:, -1]
        costs = _solve(work, times)
        distance = np.abs(work @ costs - times)
        near = distance <= OUTLIER * max(float(np.median(distance)), 1.0)
        costs = _solve(work[near], times[near])
        self._costs = np.maximum(costs, 0.0) / _SCALES


def _solve(work: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares; what was seen of no step costs nothing."""
    prior = _RIDGE * len(work) * np.eye(work.shape[1])
    solution: NDArray[np.float64] = np.linalg.solve(work.T @ work + prior, work.T @ times)
    return solution
