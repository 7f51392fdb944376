"""Blocks of GGUF files (llama.cpp) to their numbers.

Blocks are dequantised with torch, on whatever device their bytes are. The formats are those of ggml
(ggml-common.h, ggml-quants.c); results equal the `gguf` package's numpy code bit for bit, which
also reads the rare formats that have no function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from megatron_async.ops.linear.cpu.group_form import GROUP, GroupForm, Groups


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
        data = torch.from_numpy(rows).to(device)
        size, read, _ = BLOCKS[kind]
        return read(data.unflatten(-1, (-1, size))).values().flatten(len(data.shape) - 1)
    found: np.ndarray = gguf.quants.dequantize(rows, kind)
    return torch.from_numpy(found).to(device)


def groups_of(rows: Tensor, kind: Kind) -> Groups:
    """Numbers of quantised rows, uint8 `[outputs, bytes of a row]` on a CPU, of a type of
    `BLOCKS`."""
    size, read, _ = BLOCKS[kind]
    return read(rows.unflatten(-1, (-1, size))).groups()


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


class Blocks(NamedTuple):
    """Numbers of blocks: `scale * (codes - zero) - offset`, in float32 and in this order.

    Attributes:
        codes: uint8 `[..., groups, group]`: 16 or 32 that share a scale.
        scale, offset: float32 `[..., groups, 1]`; None: there is no offset.
        zero: the code of the number 0.
    """

    codes: Tensor
    scale: Tensor
    zero: int = 0
    offset: Tensor | None = None

    def values(self) -> Tensor:
        """float32 `[..., groups * group]`."""
        found = self.scale * (self.codes.to(torch.float32) - self.zero)
        return (found if self.offset is None else found - self.offset).flatten(-2)

    def groups(self) -> Groups:
        """Numbers of blocks as `Groups`; the blocks are `[outputs, blocks of a row, bytes]`."""
        codes, scale, zero, offset = self
        offsets = -zero * scale if offset is None else -offset
        scales, offsets = (each.flatten(1).unflatten(1, (-1, GROUP // codes.size(-1)))
                           for each in (scale, offsets))  # fmt: skip
        return Groups(codes.flatten(1).unflatten(1, (-1, GROUP)), scales, offsets)


def _q4_0(blocks: Tensor) -> Blocks:
    return _of_one(_nibbles(blocks[..., 2:]), blocks, zero=8)


def _q4_1(blocks: Tensor) -> Blocks:
    return _of_one(_nibbles(blocks[..., 4:]), blocks, has_offset=True)


def _q5_0(blocks: Tensor) -> Blocks:
    return _of_one(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2), blocks, zero=16)


def _q5_1(blocks: Tensor) -> Blocks:
    return _of_one(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), blocks, has_offset=True)


def _q8_0(blocks: Tensor) -> Blocks:
    return _of_one(blocks[..., 2:] ^ 128, blocks, zero=128)


def _of_one(codes: Tensor, blocks: Tensor, zero: int = 0, has_offset: bool = False) -> Blocks:
    """Blocks of one group each, which begin with its scale, then its smallest number, if any."""
    offset = -_half(blocks, 2)[..., None] if has_offset else None
    return Blocks(codes[..., None, :], _half(blocks, 0)[..., None], zero, offset)


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


def _q4_k(blocks: Tensor) -> Blocks:
    scale, offset = _k_scales(blocks)
    return Blocks(_k_nibbles(blocks[..., 16:]), scale, 0, offset)


def _q5_k(blocks: Tensor) -> Blocks:
    scale, offset = _k_scales(blocks)
    fifth = (blocks[..., None, 16:48] >> _shifts(8, 1, blocks)[:, None] & 1) << 4
    return Blocks(_k_nibbles(blocks[..., 48:]) | fifth, scale, 0, offset)


def _q6_k(blocks: Tensor) -> Blocks:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    scales = blocks[..., 192:208].view(torch.int8).to(torch.float32)
    top = (high >> _shifts(4, 2, blocks)[:, None] & 3) << 4
    codes = (_nibbles(low) | top.flatten(-2)).flatten(-2).unflatten(-1, (16, 16))
    return Blocks(codes, (_half(blocks, 208) * scales)[..., None], 32)


PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


class BlockType(NamedTuple):
    """A type of blocks.

    Attributes:
        size: bytes of a block.
        read: blocks `[..., bytes]` to their numbers.
        form: in which the numbers of a weight are kept exactly.
    """

    size: int
    read: Callable[[Tensor], Blocks]
    form: GroupForm


_HALVES_4, _HALVES_8 = GroupForm(4, 1, True), GroupForm(8, 1, True)
BLOCKS: dict[Kind, BlockType] = {
    Kind.Q4_0: BlockType(18, _q4_0, _HALVES_4),
    Kind.Q4_1: BlockType(20, _q4_1, _HALVES_4),
    Kind.Q5_0: BlockType(22, _q5_0, _HALVES_8),
    Kind.Q5_1: BlockType(24, _q5_1, _HALVES_8),
    Kind.Q8_0: BlockType(34, _q8_0, _HALVES_8),
    Kind.Q4_K: BlockType(144, _q4_k, GroupForm(4, 1, False)),
    Kind.Q5_K: BlockType(176, _q5_k, GroupForm(8, 1, False)),
    Kind.Q6_K: BlockType(210, _q6_k, GroupForm(8, 2, False)),
}
"""The types whose numbers are found by torch."""
