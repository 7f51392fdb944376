"""Check that ranks that replay one log have the same plans and samples: `check_ranks_agree`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from zlib import crc32

import numpy as np

from megatron_async.errors import RanksDisagree
from megatron_async.planning.step_plan import StepPlan
from megatron_async.ranks.actions import Digests
from megatron_async.step.text_generation_controller import LaunchedStep

MOST_KEPT = 4096
"""Most digests that are kept for comparison; older ones are dropped."""


def plan_digest(plan: StepPlan) -> dict[str, int]:
    """A checksum of every field of a plan."""
    return {field.name: _digest(getattr(plan, field.name)) for field in fields(plan)}


def sample_digest(step: LaunchedStep) -> dict[str, int]:
    """A checksum of the samples of a step that did not fail, as they arrived on this rank."""
    is_yielded = np.arange(step.samples.shape[1]) < step.counts[:, None]
    return {"samples": _digest(step.samples[is_yielded]), "counts": _digest(step.counts)}


class PlanComparer:
    """Compares followers' digests with the leader's, whichever comes first."""

    def __init__(self) -> None:
        self._expected: dict[int, dict[str, int]] = {}
        self._early: dict[int, list[tuple[int, Digests]]] = {}

    def expect(self, step: int, digest: dict[str, int]) -> None:
        """The leader's own digest of a step.

        Raises:
            RanksDisagree: a follower has reported another one before.
        """
        self._expected.setdefault(step, {}).update(digest)
        if len(self._expected) > MOST_KEPT:
            del self._expected[next(iter(self._expected))]
        for rank, digests in self._early.pop(step, ()):
            self.compare(rank, digests)

    def compare(self, rank: int, digests: Digests) -> None:
        """A follower's digest.

        Raises:
            RanksDisagree: it differs; the message names rank, step and the first field.
        """
        expected = self._expected.get(digests.step, {})
        if not digests.fields.keys() <= expected.keys():
            self._early.setdefault(digests.step, []).append((rank, digests))
            return
        for name, value in digests.fields.items():
            if expected[name] != value:
                raise RanksDisagree(
                    f"step {digests.step}: rank {rank} has other {name} than its leader. Engines "
                    "of one model must be made alike on all ranks; if they were, this is a bug."
                )


def _digest(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return crc32(np.ascontiguousarray(value).tobytes(), crc32(repr(value.shape).encode()))
    if hasattr(value, "__dataclass_fields__"):
        parts = [_digest(getattr(value, field.name)) for field in fields(value)]
        return crc32(repr(parts).encode())
    return crc32(repr(value).encode())
