"""Requests that arrive at random times: a Poisson process with lognormal lengths, by seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import ConfigurationError


@dataclass(frozen=True)
class LengthDistribution:
    """Lognormal lengths in tokens, at least 1.

    Lengths of prompts and answers are skewed to the right in published traces; a lognormal is the
    usual stand-in. The mean is the distribution's before it is cut at `longest`.
    """

    mean: float
    longest: int
    sigma: float = 0.6
    """Standard deviation of the logarithm; 0 makes all lengths equal."""

    def __post_init__(self) -> None:
        if not (1 <= self.mean <= self.longest):
            raise ConfigurationError(
                f"a mean length of {self.mean:g} tokens must lie between 1 and the longest, "
                f"{self.longest}."
            )
        if not (0 <= self.sigma < math.inf):
            raise ConfigurationError(f"sigma={self.sigma!r} must be a number of at least 0.")

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths, int64 `[count]`."""
        location = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.rint(random.lognormal(location, self.sigma, count))
        return np.clip(lengths, 1, self.longest).astype(np.int64)


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds after the trace's start."""
    prompt: NDArray[np.int32]
    """Token ids `[prompt length]`."""
    output_tokens: int
    """Tokens that it generates."""


def poisson_trace(
    rate: float,
    num_requests: int,
    prompts: LengthDistribution,
    outputs: LengthDistribution,
    vocab_size: int,
    seed: int,
) -> list[TraceRequest]:
    """A trace in order of arrival. Traces of one seed have the same requests at every rate, closer
    together or further apart.

    Args:
        rate: mean arrivals a second; infinity lets all arrive at once.
        num_requests: how many.
        prompts, outputs: length distributions.
        vocab_size: prompts are random token ids below it.
        seed: of everything.

    Raises:
        ConfigurationError: a rate that is not above 0, or no requests.
    """
    if not rate > 0 or num_requests < 1:
        raise ConfigurationError(
            f"rate={rate!r} requests/s and num_requests={num_requests!r} must both be above 0."
        )
    gaps, lengths, ids = (np.random.default_rng((seed, stream)) for stream in range(3))
    arrivals = np.cumsum(gaps.exponential(size=num_requests)) / rate
    prompt_lengths = prompts.draw(num_requests, lengths)
    output_lengths = outputs.draw(num_requests, lengths)
    return [
        TraceRequest(
            arrival_s=float(arrival),
            prompt=ids.integers(vocab_size, size=prompt_length, dtype=np.int32),
            output_tokens=int(output_length),
        )
        for arrival, prompt_length, output_length in zip(
            arrivals, prompt_lengths, output_lengths, strict=True
        )
    ]
