"""What a layer of each kind is made of: its norm, its block, the block's first and last product.

Megatron's layers hold these under different names. `PagedHybridStack` asks here, so that its loop
over layers is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_async.models.linear import InferenceColumnParallelLinear


@dataclass(frozen=True)
class LayerKind:
    """Names of modules inside a layer.

    Attributes:
        norm_name: of the layer's norm.
        block_name: of what the layer does between norm and residual add; it is called with the
            normed `[tokens, 1, hidden]` and gives its output and a bias or None.
        first_name: of the block's first product, which may take the norm along; "": there is none.
        last_name: of the block's last product, whose output may be summands for the next norm;
            "": the block itself.
    """

    norm_name: str
    block_name: str
    first_name: str = ""
    last_name: str = ""

    def norm(self, layer: Any) -> nn.RMSNorm:
        """The norm of a layer of this kind."""
        norm: nn.RMSNorm = getattr(layer, self.norm_name)
        return norm

    def block(self, layer: Any) -> Any:
        """What comes behind it."""
        return getattr(layer, self.block_name)

    def first_product(self, layer: Any) -> InferenceColumnParallelLinear | None:
        """What can take the norm along; None: nothing."""
        return getattr(self.block(layer), self.first_name) if self.first_name else None

    def last_product(self, layer: Any) -> Any:
        """What has a `may_split`."""
        block = self.block(layer)
        return getattr(block, self.last_name) if self.last_name else block


LAYER_KINDS = {
    "*": LayerKind("input_layernorm", "self_attention", "linear_qkv", "linear_proj"),
    "-": LayerKind("pre_mlp_layernorm", "mlp", "linear_fc1", "linear_fc2"),
    "E": LayerKind("pre_mlp_layernorm", "mlp"),
    "M": LayerKind("norm", "mixer", "in_proj", "out_proj"),
    "G": LayerKind("input_layernorm", "self_attention", "in_proj", "out_proj"),
}
"""By the character of Megatron's layer pattern."""
