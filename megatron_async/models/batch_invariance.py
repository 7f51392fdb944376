"""What `batch_invariant_mode` is not served with, each by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.partition import is_recurrent

MAJOR = 9
"""Compute capability on which the mode was tried; others' matrix units may add in another order."""
DTYPES = (torch.bfloat16, torch.float16)


def check_batch_invariance(model: Any, config: InferenceConfig, device: torch.device) -> None:
    """Refuse what the mode has no kernels for, before memory is taken.

    Args:
        model: Megatron's `TransformerConfig`; a `HybridModel`'s carries `hybrid_layer_pattern`.
        config: settings of the engine, whose `batch_invariant_mode` is on.
        device: of the engine; "meta" in a simulation, which computes nothing.

    Raises:
        ConfigurationError: names all that is in the way.
    """
    if device.type != "meta" and (found := [*_unserved(model, config, device)]):
        raise ConfigurationError(
            f"batch_invariant_mode=True is not served with {'; nor with '.join(found)}. Leave the "
            "mode out, or change the setting that is named."
        )


def _unserved(model: Any, config: InferenceConfig, device: torch.device) -> Iterator[str]:
    if device.type == "cpu":
        yield "device='cpu', whose loops round by the number of rows: it needs a Hopper GPU"
    elif (major := torch.cuda.get_device_capability(device)[0]) != MAJOR:
        yield f"a GPU of compute capability {major}.x: it was tried on {MAJOR}.0 alone"
    if model.params_dtype not in DTYPES:
        yield f"dtype={str(model.params_dtype).removeprefix('torch.')!r}: use 'bfloat16'"
    if config.attention_backend not in (None, "triton", "warpgroup"):
        yield f"attention_backend={config.attention_backend!r}: use 'triton' or 'warpgroup'"
    if config.quantization not in (None, "auto"):
        yield f"quantization={config.quantization!r}: use the model's own weights"
    if is_recurrent(model) and config.mamba_ssm_states_dtype != "float32":
        yield f"mamba_ssm_states_dtype={config.mamba_ssm_states_dtype!r}: use 'float32'"
    ranks = model.tensor_model_parallel_size
    if ranks > 2 and getattr(model, "sequence_parallel", False):
        # Two summands have one sum in either order; NCCL's order of more follows their bytes.
        yield f"sequence_parallel=True over {ranks} ranks: leave it out"
    is_mamba = "M" in (getattr(model, "hybrid_layer_pattern", None) or "")
    if ranks > 1 and is_mamba and model.mamba_num_groups == 1:
        yield f"mamba_num_groups=1, whose norm {ranks} ranks share: use one tensor-parallel rank"
