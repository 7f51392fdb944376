"""`quantization_config` of a Hugging Face folder: how its weights are quantised, and what else.

It stands in `config.json`, in older folders of Model-Optimizer in `hf_quant_config.json` alone. A
weight is quantised if, and only if, the files hold it so, whatever its lists of layers that are not
quantised say in whichever spelling (names, patterns, wildcards); a list that differs is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.settings import is_one_of, listed, tell_unknown
from megatron_async.ops.linear.stored_formats import CHANNEL, TENSOR, Grain

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of `config.json`."""
HF_QUANT_CONFIG = "hf_quant_config.json"
REMEDY = "take the folder of the model in 16 bits, or in another format"
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Names of a list of layers that are not quantised."""


@dataclass(frozen=True)
class Recipe:
    """How a folder is quantised.

    Attributes:
        method: of `StoredFormat.methods`.
        grains: what scales may cover where a format leaves it open.
        activations: what it says of quantised activations; empty: nothing.
        kv_cache: what it says of quantised keys and values; empty: nothing.
        has_zeros: it says that each weight of whole numbers has zeros of its own.
        ignored: names of its lists of layers that are not quantised, without wildcards at an end.
    """

    method: str
    grains: tuple[Grain, ...] = (TENSOR,)
    activations: str = ""
    kv_cache: str = ""
    has_zeros: bool = False
    ignored: frozenset[str] = frozenset()

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are meant to be stored as e4m3."""
        return self.kv_cache.lower() in ("fp8", "8 bits, float")

    def ignores(self, name: str) -> bool:
        """Whether a list has parts of a tensor's name; regular expressions are not asked."""
        parts = name.split(".", 32)
        spans = combinations(range(len(parts)), 2)
        return any(".".join(parts[a:b]) in self.ignored for a, b in spans)


def read_recipe(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None, where: str
) -> Recipe | None:
    """The recipe of a folder; None: it is not quantised.

    Args:
        config: of the language model.
        beside: the content of `hf_quant_config.json`; None: there is none.
        where: name of config.json, for error messages.

    Raises:
        CheckpointError: a method, an algorithm or a setting that is not read.
    """
    found = [(key, config[key]) for key in QUANTIZATION_KEYS if config.get(key)]
    said: dict[str, Any] = {}
    for key, value in ((HF_QUANT_CONFIG, beside or {}), *found):
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: {key} = {value!r:.200} must describe a method")
        inner = value.get("quantization")  # where Model-Optimizer writes it
        for part in (value, inner if isinstance(inner, dict) else {}):
            said |= {name: each for name, each in part.items() if each is not None}
    if not said:
        return None
    keys = _Keys(said, f"{where}: {found[0][0] if found else HF_QUANT_CONFIG}")
    method = said.get("quant_method", "modelopt" if beside or "quant_algo" in said else None)
    name = str(method).lower().replace("_", "-")
    name = "modelopt" if name.startswith("modelopt") else name.replace("-fp8", "_fp8")
    if name not in METHODS:
        raise keys.error("quant_method", f"is not read (only {', '.join(METHODS)})")
    ignored = set[str]()
    for key in LISTS:
        names = keys.get(key) or []
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise keys.error(key, "must be a list of names")
        ignored |= {each.strip(".*") for each in names}
    recipe = replace(METHODS[name](keys), ignored=frozenset(ignored))
    keys.finish(name)
    return recipe


class _Keys:
    """Keys of a description, each read or told at the end."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self._taken = set[str]()

    def get(self, *names: str) -> Any:
        """The value under one of the names of a key; None where it is missing."""
        self._taken.update(names)
        return next((self._values[name] for name in names if name in self._values), None)

    def only(self, key: str, *supported: Any) -> Any:
        """Check a value that is read with some values alone, or missing; text in any case."""
        value = self.get(key)
        folded = value.lower() if isinstance(value, str) else value
        if value is not None and not is_one_of(folded, supported):
            raise self.error(key, f"is not read (only {listed(supported)})")
        return folded

    def size(self, *names: str) -> int:
        """Inputs of a group; 0: all of them."""
        value = self.get(*names)
        if value is None or value == -1:
            return 0
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise self.error(names[0], "must be a positive integer, or -1")
        return value

    def block(self, key: str) -> Grain | None:
        """Outputs and inputs of a block."""
        value = self.get(key)
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}x[0-9]{1,6}", value):
            value = [int(size) for size in value.split("x")]
        if value is None:
            return None
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not all(type(each) is int and 0 < each <= 1 << 20 for each in value):
            raise self.error(key, "must be two positive integers")
        return value[0], value[1]

    def inner(self, key: str) -> _Keys:
        """A description inside; empty where there is none."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(key, "must be a description")
        return _Keys(value, f"{self._where}.{key:.80}")

    def entries(self, key: str) -> list[_Keys]:
        """Descriptions inside, whatever their names."""
        inside = self.inner(key)
        return [inside.inner(name) for name in inside._values]

    def cache(self) -> str:
        """What is said of keys and values, in words; empty where nothing is."""
        scheme, name = self.get("kv_cache_scheme"), self.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            return f"{scheme.get('num_bits')!s:.20} bits, {scheme.get('type')!s:.20}"
        return f"{scheme or name or ''!s:.40}"

    def error(self, key: str, problem: str) -> CheckpointError:
        said = f"{key} = {self._values.get(key)!r:.200}"
        return CheckpointError(f"{self._where}: {said} {problem}; {REMEDY}")

    def finish(self, method: str) -> None:
        """Tell of keys that nobody has read."""
        unknown = self._values.keys() - self._taken - _HARMLESS
        if unknown:
            tell_unknown(self._where, method, tuple(sorted(unknown)))


_HARMLESS = {
    "quant_method", "quantization", "producer", "version", "quantization_status", "scale_fmt",
    "dequantize", "sym", "true_sequential", "static_groups", "damp_percent",
    "damp_auto_increment", "model_name_or_path", "model_file_base_name", "meta", "quantizer",
    "dataset", "model_seqlen", "batch_size", "block_name_to_quantize", "exllama_config",
    "max_input_length", "module_name_preceding_first_block", "cache_block_outputs",
    "use_cuda_fp16", "disable_exllama", "use_exllama", "zero_point", "fuse_max_seq_len",
    "do_fuse", "lm_head", "modules_in_block_to_quantize", "modules_to_fuse", "backend",
    "global_compression_ratio", "tokenizer", "activation_scale_ub", "has_zero_point",
    "config_groups", "group_size",
}  # fmt: skip
"""Keys that say how it was made or is computed elsewhere, or what the tensors tell as well."""


def _fp8(keys: _Keys) -> Recipe:
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("expert_dtype", "fp8")
    scheme = keys.only("activation_scheme", "dynamic", "static")
    block = keys.block("weight_block_size")
    return Recipe("fp8", (block,) if block else (TENSOR, CHANNEL), scheme or "", keys.cache())


_PACKED = (
    "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_NUMBERS = ((8, "float"), (4, "float"), (4, "int"))


def _compressed(keys: _Keys) -> Recipe:
    keys.only("format", *_PACKED)
    for key in ("transform_config", "sparsity_config"):
        inner = keys.inner(key)
        if inner.get("format") not in (None, "dense") or inner.get("config_groups"):
            raise keys.error(key, "changes the weights and is not read")
    grains, activations, symmetric = set[Grain](), set[str](), list[Any]()
    for group in keys.entries("config_groups"):
        group.only("format", *_PACKED)
        group.only("output_activations")
        if group.get("weights"):
            weights = group.inner("weights")
            grains.add(_compressed_grain(weights))
            symmetric.append(weights.get("symmetric"))
        if group.get("input_activations"):
            is_dynamic = group.inner("input_activations").get("dynamic")
            activations.add("dynamic" if is_dynamic else "static")
    told = keys.cache()
    if not grains and not told:
        raise keys.error("config_groups", "describes no weights")
    has_zeros = bool(symmetric) and all(each is False for each in symmetric)
    inputs = " and ".join(sorted(activations))
    return Recipe("compressed-tensors", tuple(sorted(grains)), inputs, told, has_zeros)


def _compressed_grain(weights: _Keys) -> Grain:
    bits, kind = weights.get("num_bits"), weights.only("type", "float", "int") or "int"
    if not is_one_of((bits, kind), _NUMBERS):
        raise weights.error("num_bits", f"of type {kind!r} is not read (only {listed(_NUMBERS)})")
    weights.only("actorder", False, "weight", "static")  # with others inputs are out of order
    strategy = weights.only("strategy", "tensor", "channel", "group", "block", "tensor_group")
    block, size = weights.block("block_structure"), weights.size("group_size")
    grains = {"tensor": TENSOR, "channel": CHANNEL, "block": block or (128, 128)}
    return grains.get(strategy, (1, size))


_ALGORITHMS = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "w4a16_nvfp4", "mxfp8")
_DYNAMIC, _OF_WEIGHTS = ("fp8_per_channel_per_token", "mxfp8"), (None, "fp8_pb_wo", "w4a16_nvfp4")
"""Algorithms of Model-Optimizer: with scales of inputs that no file has, and without any."""


def _modelopt(keys: _Keys) -> Recipe:
    told = keys.only("quant_algo", *_ALGORITHMS, "mixed_precision")
    keys.only("pre_quant_scale", False)
    layers = keys.entries("quantized_layers")
    algorithms = {layer.only("quant_algo", *_ALGORITHMS) for layer in layers} | {told}
    kind = "dynamic" if told in _DYNAMIC else "static"
    inputs = "" if algorithms <= {*_OF_WEIGHTS} else kind
    return Recipe("modelopt", (TENSOR, CHANNEL, (128, 128)), inputs, keys.cache())


def _awq(keys: _Keys) -> Recipe:
    for key, only in (("bits", 4), ("w_bit", 4), ("version", "gemm")):
        keys.only(key, only)
    return Recipe("awq", ((1, keys.size("group_size", "q_group_size")),))


def _gptq(keys: _Keys) -> Recipe:
    form = keys.only("checkpoint_format", "gptq", "gptq_v2")
    for key, only in (("is_marlin_format", False), ("pack_dtype", "int32")):
        keys.only(key, only)
    grains: list[Grain] = []
    # Patterns of layers: with other settings, or (those that begin with "-") in 16 bits.
    for other in (keys, *keys.entries("dynamic")):
        other.only("bits", 4)
        size = other.size("group_size")
        if other.only("desc_act", False, True) and size:
            raise other.error("desc_act", "(act-order) is not read: quantise it without")
        if size or not grains:
            grains.append((1, size))
    return Recipe("gptq_v2" if form == "gptq_v2" else "gptq", tuple(grains))


METHODS: dict[str, Callable[[_Keys], Recipe]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: Recipe("fbgemm_fp8", (CHANNEL,), "dynamic"),
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda _: Recipe("mxfp4"),
}
"""Values of `quant_method`, also in other spellings."""
