"""Tiny folders in the formats of published quantised models, written here by their formulas alone,
and beside each the same model in float32, with the values that the formulas give.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODEL = "model.safetensors"
MATRIX = re.compile(r".*(_proj|\.fc|\.input_linear|\.output_linear)\.weight")
"""Weights that are quantised: the linear layers, but for the router, gates and the head."""

Encoded = tuple[dict[str, Tensor], Tensor]
"""Tensors by their ends after the layer's name, and the values that they stand for."""


def over(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """A scale for each value."""
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[: shape[0], : shape[1]]


def largest(w: Tensor, rows: int, columns: int) -> Tensor:
    """Largest size of a value of each block; the last ones may be short."""
    n, k = w.shape
    grid = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns)
    grid[:n, :k] = w.abs()
    return grid.view(-(-n // rows), rows, -1, columns).amax((1, 3)).clamp(min=1e-6)


def fp8(
    w: Tensor, rows: int, columns: int, end: str, dtype: torch.dtype = torch.float32,
    shape: Callable[[Tensor], Tensor] = lambda scale: scale, **others: Tensor,
) -> Encoded:  # fmt: skip
    """E4M3 with a scale a block; 0: of the whole axis."""
    rows, columns = rows or len(w), columns or w.size(1)
    scale = (largest(w, rows, columns) / 448).to(dtype)
    each = over(scale.float(), rows, columns, w.shape)
    codes = (w / each).clamp(-448, 448).to(E4M3)
    tensors = {".weight": codes, end: shape(scale), **others}
    return tensors, codes.float() * each


def mxfp8(w: Tensor) -> Encoded:
    exponent = torch.ceil(torch.log2(largest(w, 1, 32) / 448)) + 127
    each = over(torch.exp2(exponent - 127), 1, 32, w.shape)
    codes = (w / each).to(E4M3)
    return {".weight": codes, ".weight_scale": exponent.to(torch.uint8)}, codes.float() * each


def _fp4_codes(values: Tensor) -> Tensor:
    return (values[..., None] - FP4).abs().argmin(-1).to(torch.uint8)


def _bytes(codes: Tensor) -> Tensor:
    """Two in a byte, the even one low."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def mxfp4(w: Tensor) -> Encoded:
    exponent = torch.floor(torch.log2(largest(w, 1, 32))) - 2 + 127
    each = over(torch.exp2(exponent - 127), 1, 32, w.shape)
    codes = _fp4_codes(w / each)
    tensors = {".weight_packed": _bytes(codes), ".weight_scale": exponent.to(torch.uint8)}
    return tensors, FP4[codes.int()] * each


def nvfp4(w: Tensor, is_divided: bool) -> Encoded:
    outer = w.abs().max() / 2688
    outer = 1 / outer if is_divided else outer
    factor = 1 / outer if is_divided else outer
    scale = (largest(w, 1, 16) / 6 / factor).clamp(max=448).to(E4M3)
    each = over(scale.float(), 1, 16, w.shape)
    codes = _fp4_codes(w / (each * factor).clamp(min=1e-9))
    values = FP4[codes.int()] * each
    if is_divided:
        ends = (".weight_packed", ".weight_global_scale", ".input_global_scale")
        outers: tuple[Tensor, Tensor] = (outer[None], torch.ones(1))
    else:
        ends, outers = (".weight", ".weight_scale_2", ".input_scale"), (outer, torch.ones(()))
    tensors = {ends[0]: _bytes(codes), ".weight_scale": scale}
    tensors |= dict(zip(ends[1:], outers, strict=True))
    return tensors, values / outer if is_divided else values * outer


def _words(digits: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight digits of a row in an int32; nibble i holds digit `order[i]` of the eight."""
    eight = digits.to(torch.int64).unflatten(1, (-1, 8))
    word = sum(eight[..., digit] << 4 * nibble for nibble, digit in enumerate(order))
    assert isinstance(word, Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _int4(w: Tensor, group: int, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits, zeros and scales (of groups, float16), and values."""
    n, k = w.shape
    each = w.view(n, k // group, group)
    low, high = each.amin(2), each.amax(2)
    scale = ((high - low) / 15 if has_zeros else each.abs().amax(2) / 7).clamp(min=1e-3).half()
    zero = (-low / scale.float()).round().clamp(0, 15) if has_zeros else torch.full_like(low, 8)
    zeros, scales = over(zero, 1, group, w.shape), over(scale.float(), 1, group, w.shape)
    digits = (w / scales + zeros).round().clamp(0, 15)
    return digits, zero, scale, (digits - zeros) * scales


def packed(w: Tensor, group: int, has_zeros: bool = False) -> Encoded:
    """compressed-tensors' pack-quantized."""
    digits, zero, scale, values = _int4(w, group, has_zeros)
    tensors = {
        ".weight_packed": _words(digits),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(w.shape),
    }
    if has_zeros:
        tensors[".weight_zero_point"] = _words(zero.T).T
    return tensors, values


def awq(w: Tensor, group: int) -> Encoded:
    digits, zero, scale, values = _int4(w, group, has_zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros = _words(digits.T, order), _words(zero.T, order)
    return {".qweight": qweight, ".qzeros": qzeros, ".scales": scale.T}, values


def gptq(w: Tensor, group: int, is_v2: bool, has_zeros: bool) -> Encoded:
    group = w.size(1) if group == -1 else group
    digits, zero, scale, values = _int4(w, group, has_zeros)
    if has_zeros and not is_v2:  # a stored zero is one less
        zero = zero.clamp(min=1)
        zeros, scales = over(zero, 1, group, w.shape), over(scale.float(), 1, group, w.shape)
        digits = (w / scales + zeros).round().clamp(0, 15)
        values = (digits - zeros) * scales
    tensors = {
        ".qweight": _words(digits).T,
        ".qzeros": _words((zero - int(not is_v2)).T),
        ".scales": scale.T,
        ".g_idx": torch.arange(w.size(1), dtype=torch.int32) // group,
    }
    return tensors, values


class Format(NamedTuple):
    """How a folder is quantised: `quantization_config`, and each matrix."""

    config: dict[str, Any]
    encode: Callable[[Tensor], Encoded]
    beside: dict[str, Any] | None = None
    """The content of hf_quant_config.json."""


def _fp8_config(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **keys}


def _compressed(form: str, spelling: str = "compressed-tensors", **weights: Any) -> dict[str, Any]:
    inputs = weights.pop("inputs", None)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": spelling,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


_FLOAT = {"num_bits": 8, "type": "float"}
_FP4 = {"num_bits": 4, "type": "float"}
_INT = {"num_bits": 4, "type": "int"}
_ONE = torch.ones(())
BLOCKS = _fp8_config(weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "mlp.gate"])
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head", "*.mixer.conv1d"]}
FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(BLOCKS, lambda w: fp8(w, 128, 128, ".weight_scale_inv")),
    "fp8 blocks bf16": Format(
        BLOCKS, lambda w: fp8(w, 128, 128, ".weight_scale_inv", torch.bfloat16)
    ),
    "fp8 blocks e8m0": Format(
        BLOCKS | {"scale_fmt": "ue8m0"}, lambda w: fp8(w, 128, 128, ".weight_scale_inv", E8M0)
    ),
    "fp8 tensor": Format(
        _fp8_config(activation_scheme="static", weight_block_size=None, dequantize=False),
        lambda w: fp8(w, 0, 0, ".weight_scale_inv", shape=lambda s: s.reshape(()),
                      **{".activation_scale": _ONE}),
    ),
    "fp8 tensor older": Format(
        _fp8_config(activation_scheme="static", ignored_layers=["lm_head"]),
        lambda w: fp8(w, 0, 0, ".weight_scale", shape=lambda s: s.reshape(1),
                      **{".input_scale": _ONE}),
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda w: fp8(w, 1, 0, ".weight_scale"),
    ),
    "compressed tensor": Format(
        _compressed("float-quantized", **_FLOAT, strategy="tensor",
                    inputs=_FLOAT | {"dynamic": False, "strategy": "tensor"}),
        lambda w: fp8(w, 0, 0, ".weight_scale", shape=lambda s: s.reshape(1),
                      **{".input_scale": _ONE[None]}),
    ),
    "compressed channel": Format(
        _compressed("float-quantized", "compressed_tensors", **_FLOAT, strategy="channel",
                    inputs=_FLOAT | {"dynamic": True, "strategy": "token"}),
        lambda w: fp8(w, 1, 0, ".weight_scale", torch.bfloat16),
    ),
    "compressed blocks": Format(
        _compressed("float-quantized", **_FLOAT, strategy="block", block_structure=[128, 128]),
        lambda w: fp8(w, 128, 128, ".weight_scale"),
    ),
    "compressed nvfp4": Format(
        _compressed("nvfp4-pack-quantized", **_FP4, strategy="tensor_group", group_size=16,
                    inputs=_FP4 | {"dynamic": "local"}),
        lambda w: nvfp4(w, is_divided=True),
    ),
    "compressed mxfp4": Format(
        _compressed("mxfp4-pack-quantized", **_FP4, strategy="group", group_size=32), mxfp4
    ),
    "compressed mxfp8": Format(
        _compressed("mxfp8-quantized", **_FLOAT, strategy="group", group_size=32), mxfp8
    ),
    "compressed int4": Format(
        _compressed("pack-quantized", **_INT, strategy="group", group_size=32, symmetric=True),
        lambda w: packed(w, 32),
    ),
    "compressed int4 zeros": Format(
        _compressed("pack-quantized", **_INT, strategy="group", group_size=64, symmetric=False),
        lambda w: packed(w, 64, has_zeros=True),
    ),
    "compressed int4 channel": Format(
        _compressed("pack-quantized", **_INT, strategy="channel", symmetric=True),
        lambda w: packed(w, w.size(1)),
    ),
    "modelopt fp8": Format(
        MODELOPT | {"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8}},
        lambda w: fp8(w, 0, 0, ".weight_scale", shape=lambda s: s.reshape(()),
                      **{".input_scale": _ONE}),
    ),
    "modelopt channel": Format(
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda w: fp8(w, 1, 0, ".weight_scale", shape=lambda s: s.reshape(-1)),
    ),
    "modelopt blocks": Format(
        MODELOPT | {"quant_algo": "fp8_pb_wo"},
        lambda w: fp8(w, 128, 128, ".weight_scale", shape=lambda s: s[:, None, :, None]),
    ),
    "modelopt mxfp8": Format(MODELOPT | {"quant_algo": "MXFP8"}, mxfp8),
    "modelopt nvfp4": Format(
        {},
        lambda w: nvfp4(w, is_divided=False),
        {"producer": {"name": "modelopt"},
         "quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
                          "exclude_modules": ["lm_head", "*.mixer.conv1d"]}},
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
         "version": "GEMM", "modules_to_not_convert": None},
        lambda w: awq(w, 128),
    ),
    "awq 32": Format(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, lambda w: awq(w, 32)
    ),
    "gptq": Format(
        GPTQ | {"group_size": 128, "checkpoint_format": "gptq"},
        lambda w: gptq(w, 128, is_v2=False, has_zeros=False),
    ),
    "gptq zeros": Format(
        GPTQ | {"group_size": 64, "sym": False},
        lambda w: gptq(w, 64, is_v2=False, has_zeros=True),
    ),
    "gptq v2 whole columns": Format(
        GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2", "desc_act": True},
        lambda w: gptq(w, -1, is_v2=True, has_zeros=True),
    ),
}  # fmt: skip
"""By name; what `quant_method` does not tell, the name does."""


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a weight of a folder is quantised here: sizes fit every format."""
    return MATRIX.fullmatch(name) is not None and tensor.dim() == 2


def quantised_folder(
    folder: Path,
    target: Path,
    kind: str | Format,
    is_quantised: Callable[[str, Tensor], bool] = is_matrix,
    more: Mapping[str, Tensor] | None = None,
    inside: str | None = None,
) -> Path:
    """A copy of a model's folder in a format, and `target` + "-plain", the same in float32.

    Args:
        folder: with a config.json and safetensors.
        target: to write.
        kind: of `FORMATS`, or another one.
        is_quantised: which weights are, by name.
        more: further tensors.
        inside: key of config.json in which `quantization_config` stands.
    """
    form = FORMATS[kind] if isinstance(kind, str) else kind
    plain = target.with_name(f"{target.name}-plain")
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
    for copy in (target, plain):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, Tensor] = dict(more or {})
    for name, weight in weights.items():
        if not is_quantised(name, weight):
            stored[name] = weight
            continue
        tensors, weights[name] = form.encode(weight)
        stored |= {name.removesuffix(".weight") + end: t for end, t in tensors.items()}
    save_file(weights, plain / MODEL, metadata={"format": "pt"})
    stored = {name: tensor.contiguous().clone() for name, tensor in stored.items()}
    save_file(stored, target / MODEL, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    if form.config:
        (config[inside] if inside else config)["quantization_config"] = form.config
    (target / "config.json").write_text(json.dumps(config))
    if form.beside is not None:
        (target / "hf_quant_config.json").write_text(json.dumps(form.beside))
    return target
