"""The weight of a linear layer, which may be kept in fewer bits than the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.errors import ConfigurationError
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight

Operand = Tensor | QuantisedWeight
"""What a product multiplies by."""
LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
"""Modules whose weights may be kept so."""


class HeldWeight:
    """A module with a parameter `weight`. Of a quantised weight the parameter holds the codes, in
    which memory that moves, addresses and checksums see it; its other tensors are buffers.

    Attributes:
        form: of a quantised weight; None: the weight is of the model's dtype.
    """

    weight: Any
    form: Form | None = None
    _dtype: torch.dtype

    @property
    def operand(self) -> Operand:
        """The weight, as products take it."""
        if self.form is None:
            weight: Tensor = self.weight
            return weight
        scales, *others = (getattr(self, f"weight_{name}", None) for name in OTHERS)
        assert scales is not None, "see lay_out"
        return QuantisedWeight(self.weight, scales, self.form, self._dtype, *others)

    def lay_out(self, layout: Layout) -> None:
        """Give the weight, which has no numbers yet, another layout."""
        assert isinstance(self, nn.Module)
        made = layout.empty(tuple(self.weight.shape), self.weight.dtype, self.weight.device)
        self.form, self._dtype = layout.form, self.weight.dtype
        for name, tensor in made.tensors():
            if name == "codes":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(f"weight_{name}", tensor, persistent=False)


OTHERS = ("scales", "zeros", "outer", "input_scale")
"""Tensors of a `QuantisedWeight` beside the codes."""


def lay_out_quantised(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Give weights of a model, which have no numbers yet, their layouts, by parameter.

    Raises:
        ConfigurationError: a layer that holds no quantised weight.
    """
    modules = dict(model.named_modules())
    for name, layout in layouts.items():
        module = modules.get(name.removesuffix(".weight"))
        if not isinstance(module, HeldWeight):
            kind = type(module).__name__
            raise ConfigurationError(
                f"the weight {name!r} of a {kind} is not kept quantised: use quantization='none', "
                "or transformer_impl='local'."
            )
        module.lay_out(layout)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """The quantised weights of a model, by parameter."""
    for name, module in model.named_modules():
        if isinstance(module, HeldWeight) and isinstance(module.operand, QuantisedWeight):
            yield f"{name}.weight", module.operand


def is_linear(name: str) -> bool:
    """Whether a parameter, by its name, is a weight that may be kept quantised."""
    *_, module, kind = ["", *name.rsplit(".", 2)]
    return kind == "weight" and module in LINEAR
