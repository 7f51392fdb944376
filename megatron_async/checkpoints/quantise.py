"""Weights in FP8 as `convert` writes them to a Hugging Face folder: which of a model's, their
tensors, and what config.json says of them.

Linear layers and experts are quantised, each by its own values alone: a number is divided by its
scale, the largest size under the scale / 448, and rounded to the nearest of E4M3. Embeddings, the
output layer, norms, routers, gates of one output, convolutions and the step sizes of recurrent
layers stay in the model's dtype, as in published folders (Qwen3.5-FP8, DeepSeek-V3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.weight import Shape, Weight
from megatron_async.errors import ConfigurationError
from megatron_async.models.held_weight import is_linear
from megatron_async.ops.linear.quantised_weight import BLOCK, E4M3_MAX

BLOCKS, CHANNELS = "fp8", "fp8-channel"
QUANTIZATIONS = (BLOCKS, CHANNELS)
"""A scale a block of 128 x 128, by `quant_method` "fp8"; or one an output, by
"compressed-tensors"."""

_STEPS = re.compile(r".*\.in_proj_(a|b|ba)\.weight")
"""Parts of linear layers that are not: beta and the decay of Gated DeltaNet, a few rows."""
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


@dataclass(frozen=True)
class Quantiser:
    """Quantises weights of a model on their way to a folder.

    Attributes:
        kind: of `QUANTIZATIONS`.
        quantised: names of the tensors that are.
        others: modules of the other matrices, by name.
    """

    kind: str
    quantised: frozenset[str]
    others: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, wanted: Iterable[Weight]) -> Quantiser:
        """For a model's weights, by their names in the folder.

        Raises:
            ConfigurationError: a kind that is none; a matrix that blocks of 128 x 128 do not
                divide, which transformers would read with other blocks; experts in one tensor.
        """
        if kind not in QUANTIZATIONS:
            raise ConfigurationError(
                f"quantization={kind!r} is not written: use one of {', '.join(QUANTIZATIONS)}"
            )
        quantised, others = set[str](), []
        for weight in wanted:
            for name, shape in weight.parts.items():
                if is_linear(weight.name) and not _STEPS.fullmatch(name):
                    _check(kind, name, shape)
                    quantised.add(name)
                elif len(shape) > 1 and name.endswith(".weight"):
                    others.append(name.removesuffix(".weight"))
        if "lm_head" not in others:
            others.append("lm_head")  # tied, but a module of its own
        return cls(kind, frozenset(quantised), tuple(others))

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json. Modules that are not quantised have their whole
        names, since vLLM compares these and transformers takes a name as a beginning too."""
        if self.kind == BLOCKS:
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": list(self.others),
            }
        group = {
            "targets": ["Linear"],
            "weights": _FLOAT | {"strategy": "channel", "dynamic": False},
            "input_activations": _FLOAT | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(self.others),
            "kv_cache_scheme": None,
        }

    def tensors(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """What the folder has for a tensor of the model: the tensor, or codes and scales.

        Raises:
            CheckpointError: values that are no finite numbers.
        """
        if name not in self.quantised:
            return {name: values}
        rows, columns = (BLOCK, BLOCK) if self.kind == BLOCKS else (1, values.size(1))
        blocks = values.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = blocks.abs().amax((1, 3)) / E4M3_MAX
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"tensor {name!r} has values that are no finite numbers")
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # zeros can be divided
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        end = "_scale_inv" if self.kind == BLOCKS else "_scale"
        return {name: codes.view(values.shape), name + end: scales}


def _check(kind: str, name: str, shape: Shape) -> None:
    if len(shape) != 2:
        raise ConfigurationError(
            f"quantization={kind!r}: tensor {name!r} of shape {list(shape)} holds all experts of a "
            "layer, which FP8 folders do not: leave quantization out, and quantise at load"
        )
    if kind == BLOCKS and any(size % BLOCK for size in shape):
        raise ConfigurationError(
            f"quantization={kind!r}: tensor {name!r} of shape {list(shape)} has rows or columns "
            f"that {BLOCK} does not divide, which transformers would read with other blocks: use "
            f"quantization={CHANNELS!r} (a scale for each output)"
        )
