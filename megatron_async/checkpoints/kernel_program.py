"""What the kernels of an engine follow from, for a process that compiles them ahead."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from megatron_async.checkpoints.mapping import Shard
from megatron_async.checkpoints.quantised_model import Kept
from megatron_async.config import InferenceConfig
from megatron_async.models.architecture import ModelArchitecture

OF_NO_KERNEL = (
    "device", "inference_sampling_seed", "logging_step_interval", "nvtx", "check_integrity",
    "check_ranks_agree", "late_launch", "target_tpot_ms", "async_sched_mode",
    "enable_sleep_mode",
)  # fmt: skip
"""Settings that change no kernel."""


def program_of(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    config: InferenceConfig,
    kept: Kept | None = None,
    shard: Shard | None = None,
    transformer_impl: str = "local",
) -> dict[str, Any]:
    """What an engine's kernels depend on, beside the GPU and the versions, as JSON has it.

    Args:
        architecture: of what one rank has (`part_of_rank`).
        dtype: of the model.
        config: of the engine.
        kept: weights that stay quantised; None: there are none.
        shard: of the rank; None: of the only one.
        transformer_impl: of the model's layers.
    """
    with_mtp = config.speculative_method == "mtp"
    layouts = kept.layouts(replace(shard or Shard(), with_mtp=with_mtp)) if kept else {}
    return {
        "architecture": architecture.to_dict(),
        "dtype": str(dtype).removeprefix("torch."),
        "config": {n: v for n, v in asdict(config).items() if n not in OF_NO_KERNEL},
        "transformer_impl": transformer_impl,
        "layouts": {name: layout.to_json() for name, layout in layouts.items()},
    }
