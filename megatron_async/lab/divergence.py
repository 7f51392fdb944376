"""The first token at which an engine and its reference part, and whether rounding explains it.

Both have seen the same tokens up to there. The divergence is a *near tie* if the reference prefers
its own token to the engine's by less than

    tolerance = u * sqrt(2 * layers) * (largest |logit|)

where u is the unit roundoff of the dtype (2**-24 for float32, 2**-8 for bfloat16): each of a
layer's 2 sublayers adds an independent rounding error of that relative size. (SmolLM2 in bfloat16:
differences between two likely tokens are off by 0.1 to 0.4, the tolerance is 0.6 to 1.2.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.lab.references import Reference


@dataclass(frozen=True)
class Divergence:
    """The position at which a request and its reference diverge."""

    request: int
    position: int
    """Generated tokens before it."""
    reference_token: int
    engine_token: int
    top_logits: tuple[float, float]
    """The reference's two largest."""
    gap: float
    """How much the reference prefers its token to the engine's, logits."""
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= self.tolerance

    def __str__(self) -> str:
        top, second = self.top_logits
        return (
            f"request {self.request}, token {self.position}: reference {self.reference_token}, "
            f"engine {self.engine_token}; top logits {top:.5f} and {second:.5f} "
            f"({top - second:.2g} apart), gap to the engine's token {self.gap:.2g}, "
            f"tolerance {self.tolerance:.2g}: {'near tie' if self.is_near_tie else 'FAIL'}"
        )


@dataclass(frozen=True)
class LogProbDistance:
    """How far two log probs of the same tokens are apart."""

    tokens: int
    mean: float
    """Mean size of the difference."""
    largest: float
    k3: float
    """Mean of exp(d) - d - 1, where d is the second less the first: an estimate of the KL
    divergence of the second from the first (Schulman 2020), which NeMo-RL calls gen_kl_error."""

    @classmethod
    def of(cls, generated: Sequence[float], scored: Sequence[float]) -> LogProbDistance:
        """The distance of two equally long lists."""
        d = torch.tensor(scored, dtype=torch.float64) - torch.tensor(generated, dtype=torch.float64)
        if not len(d):
            return cls(0, 0.0, 0.0, 0.0)
        size, k3 = d.abs(), (d.expm1() - d).mean()
        return cls(len(d), float(size.mean()), float(size.max()), float(k3))

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, largest {self.largest:.2g}, K3 {self.k3:.2g}"


def tolerance(logits: Tensor, dtype: torch.dtype, num_blocks: int) -> float:
    """Largest gap between two logits that rounding in `dtype` may turn around.

    Args:
        logits: `[vocabulary]`.
        dtype: of the engine's weights and activations.
        num_blocks: of the model, each of which adds to the residual stream: layers of its pattern.
    """
    roundoff = torch.finfo(dtype).eps / 2
    return roundoff * math.sqrt(num_blocks) * float(logits.abs().max())


def find_divergences(
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    found: Sequence[list[int]],
    reference: Reference,
    dtype: torch.dtype,
    num_blocks: int,
) -> list[Divergence]:
    """The first difference of every request that has one, judged by the reference's logits.

    Args:
        prompts: token ids of each request.
        expected: the reference's tokens of each.
        found: the engine's, as many.
        reference: is asked again for its logits where they part.
        dtype: of the engine.
        num_blocks: of the model, each of which adds to the residual stream: layers of its pattern.
    """
    divergences = []
    for request, (prompt, want, have) in enumerate(zip(prompts, expected, found, strict=True)):
        if want == have:
            continue
        position = next(i for i in range(len(want)) if want[i] != have[i])
        logits = reference.last_logits(prompt + want[:position])
        first, second = logits.topk(2).values
        divergences.append(
            Divergence(
                request,
                position,
                want[position],
                have[position],
                (float(first), float(second)),
                float(logits[want[position]] - logits[have[position]]),
                tolerance(logits, dtype, num_blocks),
            )
        )
    return divergences
