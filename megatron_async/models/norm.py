"""RMSNorm for inference: Megatron's weight, and the factors that a step multiplies by.

With Megatron's `layernorm_zero_centered_gamma` a norm multiplies by 1 + weight (Qwen3-Next, as
Gemma before). Checkpoints and parameters have the weight, so that a conversion keeps its bits.
Steps read the sum, which is computed once, in float32 or wider, when the model is wrapped.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.ops.all_ops import Ops
from megatron_async.ops.linear.stream import Stream


class InferenceRMSNorm(nn.RMSNorm):
    """torch's RMSNorm (Zhang and Sennrich 2019) of `size` elements, whose factors may be 1 +
    weight."""

    def __init__(self, size: int, eps: float, is_zero_centered: bool) -> None:
        super().__init__(size, eps=eps)
        self.is_zero_centered = is_zero_centered
        self._folded: Tensor | None = None

    @property
    def factors(self) -> Tensor:
        """`[size]`: what normed elements are multiplied by; float32 or wider where it is 1 +
        weight.

        Raises:
            RuntimeError: `fold_norms` has not been called.
        """
        if not self.is_zero_centered:
            return self.weight
        if self._folded is None:
            raise RuntimeError(
                "a norm with layernorm_zero_centered_gamma=True was used before fold_norms(model) "
                "was called: wrap the model in GPTInferenceWrapper, which calls it."
            )
        return self._folded

    def fold(self) -> None:
        """Compute the factors from the weight, into the same memory as before."""
        if not self.is_zero_centered:
            return
        wide = self._sum()
        if self._folded is None or self._folded.device != wide.device:
            self._folded = wide
        else:
            self._folded.copy_(wide)

    @property
    def is_folded_from_weight(self) -> bool:
        """Whether the factors are those of the present weight."""
        return self._folded is None or torch.equal(self._folded, self._sum())

    def _sum(self) -> Tensor:
        weight = self.weight.detach()
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same, by factors."""
        factors = self.factors
        wide = torch.rms_norm(x.to(factors.dtype), (x.size(-1),), factors, self.eps)
        return wide.to(x.dtype)


def make_norm(config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> nn.RMSNorm:
    """A norm of our layer spec, called as Megatron's `WrappedTorchNorm`, which refuses sequence
    parallelism for the gradients' sake."""
    return InferenceRMSNorm(hidden_size, eps, config.layernorm_zero_centered_gamma)


def make_post_norm(config: TransformerConfig) -> nn.RMSNorm | None:
    """The norm behind attention or an MLP (`ModelConfig.has_post_norms`); None: there is none."""
    if not getattr(config, "has_post_norms", False):
        return None
    return make_norm(config, config.hidden_size, config.layernorm_epsilon)


def factors_of(norm: nn.Module) -> Tensor:
    """Factors of a norm, `[size]`: `factors` of an `InferenceRMSNorm`, else the norm's weight."""
    if isinstance(norm, InferenceRMSNorm):
        return norm.factors
    weight = norm.weight
    assert isinstance(weight, Tensor), "fitness has refused others"
    return weight


def normalise(ops: Ops, stream: Stream) -> None:
    """Do the sums and the norm of a stream, if one is left, as a kernel of its own: `value` becomes
    normed, and `total` is set."""
    if stream.weight is None:
        return
    add = stream.parts_of_ranks or ops.add_rms_norm
    stream.value, stream.total = add(*stream.norm_arguments)
    stream.weight = stream.residual = stream.parts_of_ranks = None


def normalised(ops: Ops, stream: Stream, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """A stream behind a norm of its own, `[rows, k]`, and without it."""
    set_norm(stream, norm)
    normalise(ops, stream)
    assert stream.total is not None, "normalise sets it"
    return stream.value, stream.total


def set_norm(stream: Stream, norm: nn.RMSNorm) -> None:
    """The norm before the stream's next product."""
    assert norm.eps is not None, "make_norm sets it"
    stream.weight, stream.eps = factors_of(norm), norm.eps


def fold_norms(model: nn.Module) -> None:
    """Make the factors of all norms of `model`; call it again when its weights have changed.

    Captured steps read the same memory, so they need not be captured again.
    """
    for module in model.modules():
        if isinstance(module, InferenceRMSNorm):
            module.fold()
