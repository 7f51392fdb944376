"""`ProfileWorkload`: what `megatron-async profile` runs. Without torch, to tell early."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import (
    LengthDistribution,
    TraceRequest,
    poisson_trace,
)
from megatron_async.lab.workloads import Churn, steady_decode_tokens

WORKLOADS = {
    "steady": "a full batch decodes; nobody arrives or ends",
    "churn": "requests end and arrive in every step",
    "trace": "requests of random lengths arrive at random times",
}
BLOCK_SIZE = 64
LEAST_MAX_TOKENS = 512
MOST = 2**24
"""The largest size or seed of a workload."""
LONGEST_OVER_MEAN = 4
"""Lengths of a trace are cut at so many times their mean."""


@dataclass(frozen=True)
class ProfileWorkload:
    """What to run.

    Raises:
        ConfigurationError: an unknown workload, or a value out of range.
    """

    name: str
    """One of `WORKLOADS`."""
    batch: int = 16
    """Rows of a step; with a trace, the most."""
    prompt_tokens: int = 64
    """Length of each prompt; with a trace, the mean."""
    steps: int = 200
    """Steps to record; not of a trace."""
    finishes: int = 1
    """Requests that end, and that arrive, in each step of churn."""
    requests: int = 32
    """Requests of a trace."""
    rate: float = 4.0
    """Arrivals a second of a trace."""
    output_tokens: int = 64
    """Mean answer of a trace."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ConfigurationError(
                f"workload={self.name!r} is unknown: use one of {', '.join(WORKLOADS)}."
            )
        least = {"batch": 1, "prompt_tokens": 1, "steps": 2, "requests": 1, "output_tokens": 2}
        for name, smallest in (least | {"seed": 0}).items():
            if not smallest <= getattr(self, name) <= MOST:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} must be from {smallest} to {MOST}."
                )
        if not 0 < self.rate < math.inf:
            raise ConfigurationError(f"rate={self.rate!r} must be a number above 0.")
        Churn.lifetimes(self.batch, self.finishes)

    def engine_settings(self, lookahead: int) -> dict[str, Any]:
        """Fields of `InferenceConfig` that make room for it."""
        slots, longest, step_tokens = self.batch, self.prompt_tokens, LEAST_MAX_TOKENS
        if self.name == "churn":
            slots = Churn.slots(self.batch, self.finishes, lookahead)
            step_tokens = Churn.step_tokens(self.batch, self.prompt_tokens, self.finishes)
            longest += max(Churn.lifetimes(self.batch, self.finishes))
        max_tokens = max(step_tokens, LEAST_MAX_TOKENS, slots)
        if self.name == "steady":
            longest += steady_decode_tokens(self.batch, self.prompt_tokens, max_tokens, self.steps)
        if self.name == "trace":
            longest = LONGEST_OVER_MEAN * (self.prompt_tokens + self.output_tokens)
        return {
            "lookahead": lookahead,
            "max_requests": slots,
            "max_tokens": max_tokens,
            "max_sequence_length": longest,
            "block_size_tokens": BLOCK_SIZE,
            "num_kv_blocks": (slots + self.finishes) * (longest // BLOCK_SIZE + 2),
        }

    def trace(self, vocab_size: int, rate: float) -> list[TraceRequest]:
        """The requests of a trace."""
        prompts, outputs = (
            LengthDistribution(mean, LONGEST_OVER_MEAN * mean)
            for mean in (self.prompt_tokens, self.output_tokens)
        )
        return poisson_trace(rate, self.requests, prompts, outputs, vocab_size, self.seed)
