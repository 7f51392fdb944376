"""Random weights of each form in which a device may keep them."""

import torch
from torch import Tensor

from megatron_async.ops.linear.quantised_weight import BLOCK, Form, QuantisedWeight

E8M0, E4M3 = torch.uint8, torch.float8_e4m3fn
FORMS = {
    "FP8 blocks": (Form("FP8", BLOCK, BLOCK), torch.float32),
    "FP8 groups": (Form("FP8", 1, BLOCK), torch.bfloat16),
    "FP8 outputs": (Form("FP8"), torch.float32),
    "MXFP8": (Form("FP8", 1, 32), E8M0),
    "INT4": (Form("INT4", 1, 128), torch.bfloat16),
    "INT4 zeros": (Form("INT4", 1, 128, has_zeros=True), torch.float16),
    "INT4 outputs, zeros": (Form("INT4", has_zeros=True), torch.float32),
    "INT4 groups of 64": (Form("INT4", 1, 64), torch.float32),
    "INT4 groups of 32, zeros": (Form("INT4", 1, 32, has_zeros=True), torch.bfloat16),
    "MXFP4": (Form("FP4", 1, 32), E8M0),
    "NVFP4": (Form("FP4", 1, 16, has_outer=True), E4M3),
}
"""Form, and the dtype of scales, by name."""


def kept_weight(
    name: str,
    *shape: int,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> QuantisedWeight:
    """A weight `[.., n, k]`: torch's random numbers, so that products of rows of ones are about
    one. What is read beyond one of its tensors is not: codes lie inside of NaN, or of ones."""
    form, scale_dtype = FORMS[name]
    *lead, n, k = shape
    grid = (*lead, -(-n // form.rows), -(-k // form.inputs) if form.inputs else 1)
    if form.bits == 8:
        codes = torch.randn(shape).to(E4M3)
        spread = 1.0
    else:
        codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
        spread = 4.0
    size = k**-0.5 / spread
    if scale_dtype == E8M0:
        exponent = 127 + round(torch.tensor(size).log2().item())
        scales = torch.randint(exponent - 1, exponent + 2, grid, dtype=torch.uint8)
    elif scale_dtype == E4M3:
        scales = (torch.rand(grid) + 0.5).to(E4M3)
    else:
        scales = ((torch.rand(grid) + 0.5) * size).to(scale_dtype)
    zeros = torch.randint(0, 16, grid, dtype=torch.uint8) if form.has_zeros else None
    outer = (torch.rand(*lead, n) + 0.5) * size if form.has_outer else None

    return QuantisedWeight(
        _amid(codes, device),
        _amid(scales, device),
        form,
        dtype,
        None if zeros is None else _amid(zeros, device),
        None if outer is None else _amid(outer, device),
    )


def _amid(tensor: Tensor, device: str) -> Tensor:
    """The tensor inside of memory whose bytes are all ones: NaN of floating-point numbers."""
    size, edge = tensor.nbytes, 64
    memory = torch.full((size + 2 * edge,), 255, dtype=torch.uint8, device=device)
    inside = memory[edge : edge + size].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    return inside
