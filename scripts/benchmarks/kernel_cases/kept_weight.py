"""Random weights as a device keeps them: in the model's dtype, or in fewer bits."""

import torch
from torch import Tensor

from kernel_cases.case import random
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.ops.linear.quantised_weight import BLOCK, Form, QuantisedWeight

MODEL = "model"
LAYOUTS = {
    "fp8": Layout(Form("FP8")),
    "fp8-blocks": Layout(Form("FP8", BLOCK, BLOCK)),
    "fp8-rows": Layout(Form("FP8", BLOCK, BLOCK, rounds_rows=True)),
    "int4": Layout(Form("INT4", 1, 128), torch.bfloat16),
    "mxfp4": Layout(Form("FP4", 1, 32), torch.uint8),
    "nvfp4": Layout(Form("FP4", 1, 16, has_outer=True), torch.float8_e4m3fn),
}
"""What `--weights` takes, but for the model's dtype; of "fp8-rows" rows are rounded too."""


def bytes_of_number(name: str, itemsize: int) -> float:
    """Bytes that a number of a large weight takes, its share of scales included."""
    if name == MODEL:
        return itemsize
    side = 1 << 12
    weight = LAYOUTS[name].empty((side, side), torch.bfloat16, torch.device("meta"))
    return weight.nbytes / side**2


def draw(name: str, *size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor | QuantisedWeight:
    """A weight of random numbers, about as large as `scale`."""
    if name == MODEL:
        return random(*size, dtype=dtype, scale=scale)
    weight = LAYOUTS[name].empty(size, dtype, torch.device("cuda"))
    if weight.form.bits == 8:
        weight.codes.copy_(random(*size, dtype=dtype))
    else:
        weight.codes.random_(0, 256)
    if weight.scales.dtype == torch.uint8:
        weight.scales.fill_(127 + round(torch.tensor(scale / 4).log2().item()))
    elif weight.outer is not None:
        weight.scales.copy_(torch.ones_like(weight.scales, dtype=dtype))
        weight.outer.fill_(scale / 4)
    else:
        weight.scales.fill_(scale / (1 if weight.form.bits == 8 else 4))
    return weight
