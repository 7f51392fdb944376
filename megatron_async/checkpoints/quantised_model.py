"""Which weights of a model a GPU keeps quantised: `InferenceConfig.quantization` and the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.quantised_pieces import fp8_layouts, rounding
from megatron_async.checkpoints.source import ModelSource
from megatron_async.errors import ConfigurationError
from megatron_async.ops.linear.quantised_layout import Layout

logger = logging.getLogger("megatron_async")

FILE, FP8 = "file", "fp8"
"""Values of `InferenceConfig.quantization`: weights stay the files', on a CPU with rows of 16 bits;
16-bit weights are rounded."""
OF_FP8 = (8, 9)
"""Least compute capability of GPUs that multiply FP8 by FP8."""


def keeps_on(device: str) -> bool:
    """Whether a device keeps quantised weights of a folder, as its products take them."""
    return torch.device(device).type == "cuda"


def chosen_quantization(
    asked: str | None,
    source: ModelSource,
    device: str,
    transformer_impl: str = "local",
    is_default: bool = True,
) -> str | None:
    """The value of `quantization`, if it is possible; None: weights are decoded.

    Args:
        asked: by the user; None: `FILE` where `is_default` and the device keeps weights of the
            source.
        source: of the model.
        device: by its name.
        transformer_impl: of the model's layers.
        is_default: the engine's other settings let it keep weights without being asked.

    Raises:
        ConfigurationError: "file" or "fp8" was asked for, and is not possible.
    """
    is_kept, told = keeps_on(device), source.quantised
    is_found = is_kept and bool(source.layouts(Shard(), False))
    formats = told.formats if told is not None and is_found else "none"
    if asked == FP8:
        reason = ""
        if not is_kept:
            reason = "is for GPUs: leave it out"
        elif is_found:
            reason = f"is for weights of 16 bits, but {source.name} holds {formats}: leave it out"
        elif transformer_impl != "local":
            reason = f"is not served with transformer_impl={transformer_impl!r}: use 'local'"
        if reason:
            raise ConfigurationError(f"quantization={asked!r} {reason}.")
    if asked == FILE and is_kept and (not is_found or transformer_impl != "local"):
        raise ConfigurationError(
            f"quantization={asked!r} keeps weights that a Hugging Face folder holds quantised, with"
            f" transformer_impl='local'; {source.name} holds {formats}: leave it out."
        )
    if asked is None and is_found and is_default and transformer_impl == "local":
        return FILE
    return asked


class Kept(NamedTuple):
    """Weights of a model that an engine keeps quantised.

    Attributes:
        source: of the model.
        quantization: `FILE` or `FP8`; None: no weights are kept so.
        rounds_rows: products round rows to FP8 where they can.
    """

    source: ModelSource
    quantization: str | None
    rounds_rows: bool = False

    @classmethod
    def on(
        cls,
        device: str,
        settings: dict[str, Any],
        source: ModelSource,
        transformer_impl: str = "local",
        capability: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        tensor_size: int = 1,
    ) -> Kept:
        """Weights kept on a device.

        Args:
            device: by its name.
            settings: fields of `InferenceConfig`, of which `quantization` becomes what it means.
            source: of the model.
            transformer_impl: of its layers.
            capability: compute capability of the GPU; None: of that which is here.
            dtype: of the model. One of 32 bits is asked for because of its precision, so weights
                are decoded unless `settings` ask for another thing, as with batch_invariant_mode.
            tensor_size: ranks that cut the weights. Where they cut a group of inputs, and nobody
                has asked, weights are decoded, and a line is logged.

        Raises:
            ConfigurationError: as `chosen_quantization`.
        """
        asked = settings.get("quantization")
        is_default = dtype.itemsize == 2 and not settings.get("batch_invariant_mode")
        quantization = chosen_quantization(asked, source, device, transformer_impl, is_default)
        if quantization not in (FILE, FP8) or not keeps_on(device):
            return cls(source, None)
        if asked is None:
            try:
                source.layouts(Shard(tensor_size=tensor_size), False)
            except ConfigurationError as error:
                logger.warning("All weights are decoded: %s", error)
                return cls(source, None)
        settings["quantization"] = quantization
        if torch.device(device).type != "cuda":
            return cls(source, quantization)
        found = torch.cuda.get_device_capability(device) if capability is None else capability
        return cls(source, quantization, tuple(found) >= OF_FP8)

    def layouts(self, shard: Shard) -> Mapping[str, Layout]:
        """Layouts of the weights of a rank, by parameter.

        Raises:
            ConfigurationError: ranks cut a weight within groups of inputs.
        """
        if self.quantization == FP8:
            found = fp8_layouts(weights(self.source.architecture, shard))
            return rounding(found) if self.rounds_rows else found
        return self.source.layouts(shard, self.rounds_rows) if self.quantization == FILE else {}

    def of_model(self, model: nn.Module) -> Mapping[str, Layout]:
        """`layouts` of the rank that a model was built for."""
        return self.layouts(Shard.of(model))

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the model's weights on all ranks together, in a dtype but for quantised ones;
        without multi-token prediction."""
        total = self.source.architecture.num_parameters * dtype.itemsize
        layouts = self.layouts(Shard())
        for weight in weights(self.source.architecture) if layouts else ():
            if layout := layouts.get(weight.name):
                kept = layout.empty(weight.shape, dtype, torch.device("meta"))
                total -= kept.shape.numel() * dtype.itemsize - kept.nbytes
        return total
