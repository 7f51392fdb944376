"""Blocks of GGUF files (llama.cpp) to their numbers.

Blocks are dequantised with torch, on whatever device their bytes are. The formats are those of ggml
(ggml-common.h, ggml-quants.c); results equal the `gguf` package's numpy code bit for bit, which
also reads the rare formats that have no function here.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor


def dequantise(rows: np.ndarray, kind: Kind, device: torch.device) -> Tensor:
    """Values of quantised rows, float32 `[..., row]` on `device`, where they are computed.

    Args:
        rows: as `gguf.GGUFReader` gives them: `[..., bytes of a row]`, or `[..., row]` of a float
            type. On a CPU what is stored as float32 is not copied.

    Raises:
        NotImplementedError: neither torch code nor the gguf package knows this quantisation.
    """
    if kind in PLAIN:
        data = torch.from_numpy(rows.view(np.uint8)).to(device)
        return data.view(PLAIN[kind]).to(torch.float32)
    if kind in BLOCKS:
        size, values = BLOCKS[kind]
        data = torch.from_numpy(rows).to(device)
        return values(data.unflatten(-1, (-1, size))).flatten(len(data.shape) - 1)
    found: np.ndarray = gguf.quants.dequantize(rows, kind)
    return torch.from_numpy(found).to(device)


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from neighbouring pairs to two halves: `[heads * dim, in]`, a copy."""
    rows, columns = tensor.shape
    return (
        tensor.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of every block, as float32 `[..., 1]`."""
    return blocks[..., start : start + 2].view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of the bytes, then the high halves: `[..., n]` -> `[..., 2 n]`."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _shifts(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """32 bits from 4 bytes, each shifted to be the fifth bit of a value."""
    bits = blocks[..., start : start + 4, None] >> _shifts(8, 1, blocks)
    return (bits & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[..., 2:]).to(torch.float32) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[..., 4:]).to(torch.float32) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (values.to(torch.float32) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.to(torch.float32) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).to(torch.float32)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the 8 sub-blocks of a Q4_K or Q5_K block, float32 `[..., 8, 1]`.

    Both are 6-bit integers packed into 12 bytes, times a float16 of the block.
    """
    low, middle, high = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    offsets = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    scale = _half(blocks, 0) * scales.to(torch.float32)
    offset = _half(blocks, 2) * offsets.to(torch.float32)
    return scale[..., None], offset[..., None]


def _k_nibbles(packed: Tensor) -> Tensor:
    """128 bytes to 8 sub-blocks of 32: `[..., 8, 32]`."""
    return _nibbles(packed.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, offset = _k_scales(blocks)
    return (scale * _k_nibbles(blocks[..., 16:]).to(torch.float32) - offset).flatten(-2)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, offset = _k_scales(blocks)
    fifth = (blocks[..., None, 16:48] >> _shifts(8, 1, blocks)[:, None] & 1) << 4
    values = _k_nibbles(blocks[..., 48:]) | fifth
    return (scale * values.to(torch.float32) - offset).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    scales = blocks[..., 192:208].view(torch.int8).to(torch.float32)
    top = (high >> _shifts(4, 2, blocks)[:, None] & 3) << 4
    values = (_nibbles(low) | top.flatten(-2)).flatten(-2).to(torch.float32) - 32
    scale = _half(blocks, 208) * scales
    return (scale[..., None] * values.unflatten(-1, (16, 16))).flatten(-2)


PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}

BLOCKS: dict[Kind, tuple[int, Callable[[Tensor], Tensor]]] = {
    Kind.Q4_0: (18, _q4_0),
    Kind.Q4_1: (20, _q4_1),
    Kind.Q5_0: (22, _q5_0),
    Kind.Q5_1: (24, _q5_1),
    Kind.Q8_0: (34, _q8_0),
    Kind.Q4_K: (144, _q4_k),
    Kind.Q5_K: (176, _q5_k),
    Kind.Q6_K: (210, _q6_k),
}
"""Bytes of a block, and a function from blocks `[..., bytes]` to values `[..., values]`."""
