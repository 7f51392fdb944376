"""Formats of quantised weights as published files store them.

A format is a row of `FORMATS`: the tensors of a layer, which values an entry of each covers, and
how their numbers make a weight `[n, k]` (outputs, inputs), or `[e, n, k]` of all experts:

    (code - zero) * scale * outer     # or / outer

The formats are those of compressed-tensors' compressors, NVIDIA's Model-Optimizer, AutoAWQ and
GPTQModel; numbers of 4 and 8 bits are those of the OCP MX specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

Shape = tuple[int, ...]
CODES, SCALE, ZERO, OUTER = "codes", "scale", "zero", "outer"
ORDER, SIZES = "order", "sizes"
"""What a tensor is to a weight: its numbers; what they are multiplied by, less what, and a second
factor of all; the group of each input; the weight's shape, which is read before all others."""
GRAIN = 0
"""An entry of an axis covers as many values as the scales of this weight have there."""
Grain = tuple[int, int]
"""Outputs and inputs that a scale covers; 0: all of them."""
TENSOR, CHANNEL = (0, 0), (1, 0)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NATURAL = tuple(range(8))
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight neighbouring outputs."""

_E4M3, _E8M0, _BYTE, _WORD = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int32
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Axis(NamedTuple):
    """An axis of a stored tensor: the weight's axis ("e", "n" or "k"), values of it that an entry
    covers, and whether the entry holds these values, as digits of 4 bits."""

    name: str
    covers: int = 1
    is_packed: bool = False


class Part(NamedTuple):
    """A stored tensor of a weight: its name after the layer's, or the names that it may have;
    dtypes; axes; and how many entries each place of the last axis has (1 without an axis)."""

    ends: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    axes: tuple[Axis, ...] = ()
    inner: int = 1

    def dims(self, shape: Shape) -> list[int | None] | None:
        """The dimension of a stored tensor that each axis is, or None for one that is left out, as
        its size is 1; None as a whole: the tensor has too many dimensions."""
        count = len(self.axes)
        if self.inner > 1:
            fits = len(shape) == count + 1 and shape[-1] == self.inner
            return list(range(count)) if fits else None
        if count and len(shape) == 2 * count and set(shape[1::2]) == {1}:
            return list(range(0, 2 * count, 2))  # a grid of blocks, as Model-Optimizer writes it
        if len(shape) <= max(count, 1) and (count or set(shape) <= {1}):
            return [*range(min(len(shape), count)), *[None] * (count - len(shape))]
        return None


class StoredFormat(NamedTuple):
    """A format of stored weights.

    Attributes:
        name: in words.
        bits: of a code.
        methods: of `quantization_config`, whose files have it.
        parts: the stored tensors, by what they are to a weight.
        optional: those that may be missing.
        is_divided: `OUTER` divides.
        zero: of a weight that has none stored.
        zero_offset: what stored zeros are less than they mean.
        order: place in a word of each of eight digits.
    """

    name: str
    bits: int
    methods: tuple[str, ...]
    parts: Mapping[str, Part]
    optional: tuple[str, ...] = (ZERO, ORDER)
    is_divided: bool = False
    zero: int = 0
    zero_offset: int = 0
    order: tuple[int, ...] = NATURAL

    @property
    def takes_grain(self) -> bool:
        """Whether its scales cover what the configuration or their shape says."""
        return any(axis.covers == GRAIN for axis in self.parts[SCALE].axes)


_N, _K, _NIBBLES, _WORDS = Axis("n"), Axis("k"), Axis("k", 2, True), Axis("k", 8, True)
_BY_GRAIN = (Axis("n", GRAIN), Axis("k", GRAIN))
_GROUPS, _OUTPUT_WORDS = Axis("k", GRAIN), Axis("n", 8, True)
_GPTQ = {
    CODES: Part((".qweight",), (_WORD,), (_WORDS, _N)),
    SCALE: Part((".scales",), _FLOATS, (_GROUPS, _N)),
    ZERO: Part((".qzeros",), (_WORD,), (_GROUPS, _OUTPUT_WORDS)),
    ORDER: Part((".g_idx",), (_WORD,), (_K,)),
}
FORMATS = (
    StoredFormat(
        "FP8",
        8,
        ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"),
        {
            CODES: Part((".weight",), (_E4M3,), (_N, _K)),
            SCALE: Part((".weight_scale_inv", ".weight_scale"), (*_FLOATS, _E8M0), _BY_GRAIN),
        },
    ),
    StoredFormat(
        "MXFP8",
        8,
        ("compressed-tensors", "modelopt"),
        {
            CODES: Part((".weight",), (_E4M3,), (_N, _K)),
            SCALE: Part((".weight_scale",), (_BYTE, _E8M0), (_N, Axis("k", 32))),
        },
    ),
    StoredFormat(
        "NVFP4",
        4,
        ("compressed-tensors",),
        {
            CODES: Part((".weight_packed",), (_BYTE,), (_N, _NIBBLES)),
            SCALE: Part((".weight_scale",), (_E4M3,), (_N, Axis("k", 16))),
            OUTER: Part((".weight_global_scale",), _FLOATS),
        },
        is_divided=True,
    ),
    StoredFormat(
        "NVFP4",
        4,
        ("modelopt",),
        {
            CODES: Part((".weight",), (_BYTE,), (_N, _NIBBLES)),
            SCALE: Part((".weight_scale",), (_E4M3,), (_N, Axis("k", 16))),
            OUTER: Part((".weight_scale_2",), _FLOATS),
        },
    ),
    StoredFormat(
        "MXFP4",
        4,
        ("compressed-tensors",),
        {
            CODES: Part((".weight_packed",), (_BYTE,), (_N, _NIBBLES)),
            SCALE: Part((".weight_scale",), (_BYTE, _E8M0), (_N, Axis("k", 32))),
        },
    ),
    StoredFormat(
        "MXFP4",
        4,
        ("mxfp4",),
        {
            CODES: Part(("_blocks",), (_BYTE,), (Axis("e"), _N, Axis("k", 32, True)), inner=16),
            SCALE: Part(("_scales",), (_BYTE, _E8M0), (Axis("e"), _N, Axis("k", 32))),
        },
    ),
    StoredFormat(
        "INT4",
        4,
        ("compressed-tensors",),
        {
            CODES: Part((".weight_packed",), (_WORD,), (_N, _WORDS)),
            SCALE: Part((".weight_scale",), _FLOATS, (_N, _GROUPS)),
            ZERO: Part((".weight_zero_point",), (_WORD,), (_OUTPUT_WORDS, _GROUPS)),
            ORDER: Part((".weight_g_idx",), (_WORD,), (_K,)),
            SIZES: Part((".weight_shape",), (torch.int64, _WORD)),
        },
        zero=8,
    ),
    StoredFormat(
        "INT4",
        4,
        ("awq",),
        {
            CODES: Part((".qweight",), (_WORD,), (_K, _OUTPUT_WORDS)),
            SCALE: Part((".scales",), _FLOATS, (_GROUPS, _N)),
            ZERO: Part((".qzeros",), (_WORD,), (_GROUPS, _OUTPUT_WORDS)),
        },
        optional=(),
        order=AWQ_ORDER,
    ),
    StoredFormat("INT4", 4, ("gptq",), _GPTQ, optional=(ORDER,), zero_offset=1),
    StoredFormat("INT4", 4, ("gptq_v2",), _GPTQ, optional=(ORDER,)),
)
"""Formats that are read. Which one a weight has follows from its tensors, but for the method."""


def format_of(
    tensors: Mapping[str, torch.dtype], method: str
) -> tuple[StoredFormat, dict[str, str]]:
    """The format of a layer's tensors, and the ends of their names by what they are to a weight.

    Args:
        tensors: their dtypes, by the ends of their names.
        method: of `quantization_config`.

    Raises:
        ValueError: they are no whole weight in any format of the method.
    """
    wanted = []
    for each in FORMATS:
        if method in each.methods:
            roles = {
                role: end
                for role, part in each.parts.items()
                for end in part.ends
                if tensors.get(end) in part.dtypes
            }
            needed = each.parts.keys() - {*each.optional}
            if roles.keys() >= needed and len(roles) == len(tensors):
                return each, roles
            parts = [each.parts[role] for role in each.parts if role in needed]
            wanted.append(f"{each.name}: " + ", ".join("/".join(part.ends) for part in parts))
    have = ", ".join(f"{end} ({str(dtype)[6:]})" for end, dtype in sorted(tensors.items()))
    raise ValueError(f"{have} are no whole weight of {method} ({'; '.join(wanted)})")
