"""Parts of a layer of each kind: its norm, its block, the block's first and last product.

Megatron's layers have these under different names. `PagedHybridStack` looks them up here, so that
its loop over layers is the same for all kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

BLOCK_ITSELF = "."
"""Name of a layer's block where it stands for one of the block's products."""


class TakesUnnormed(Protocol):
    """A module that may compute the norm before it too."""

    def takes_unnormed(self, hidden_states: Tensor) -> bool:
        """Whether the module should get an `Unnormed` of `[tokens, 1, hidden]`, or of partial sums,
        `[splits, tokens, 1, hidden]`."""


@dataclass(frozen=True)
class LayerKind:
    """Names of modules inside a layer.

    Attributes:
        norm_name: of the layer's norm.
        block_name: of the module between norm and residual add. It is called with the normed
            `[tokens, 1, hidden]`, and returns its output and a bias or None.
        first_name: of the block's first product, which may compute the norm too.
        last_name: of the block's last product, whose output may be partial sums for the next norm.
    """

    norm_name: str
    block_name: str
    first_name: str = BLOCK_ITSELF
    last_name: str = BLOCK_ITSELF

    def norm(self, layer: Any) -> nn.RMSNorm:
        """The norm of a layer of this kind."""
        norm: nn.RMSNorm = getattr(layer, self.norm_name)
        return norm

    def block(self, layer: Any) -> Any:
        """The block after the norm."""
        return getattr(layer, self.block_name)

    def first_product(self, layer: Any) -> TakesUnnormed:
        """The product that may compute the norm too."""
        product: TakesUnnormed = self._inside(layer, self.first_name)
        return product

    def last_product(self, layer: Any) -> Any:
        """The product that has `may_split`, `adds_residual` and `residual`."""
        return self._inside(layer, self.last_name)

    def _inside(self, layer: Any, name: str) -> Any:
        block = self.block(layer)
        return block if name == BLOCK_ITSELF else getattr(block, name)


LAYER_KINDS = {
    "*": LayerKind("input_layernorm", "self_attention", "linear_qkv", "linear_proj"),
    "-": LayerKind("pre_mlp_layernorm", "mlp", "linear_fc1", "linear_fc2"),
    "E": LayerKind("pre_mlp_layernorm", "mlp"),
    "M": LayerKind("norm", "mixer", "in_proj", "out_proj"),
    "G": LayerKind("input_layernorm", "self_attention", "in_proj", "out_proj"),
}
"""By the character of Megatron's layer pattern."""
