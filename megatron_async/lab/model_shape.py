"""`ModelShape`: what scheduling needs to know of a model, without the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.checkpoints.source import parse_dtype
from megatron_async.models.architecture import ATTENTION, DELTA, MAMBA, ModelArchitecture
from megatron_async.models.partition import layer_windows
from megatron_async.models.sizes import SIZES_OF

if TYPE_CHECKING:
    from megatron_async.planning.dynamic_context import DynamicInferenceContext


@dataclass(frozen=True)
class ModelShape:
    """Stands for Megatron's `TransformerConfig` in a `DynamicInferenceContext` without a model; it
    has its field names."""

    num_layers: int
    """Layers with a KV cache; of pipeline stages, that with most, whose blocks are the largest."""
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    dtype: str
    """Dtype of the KV cache: "float32", "bfloat16" or "float16"."""
    vocab_size: int
    layernorm_epsilon: float = 1e-5
    pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    """Ranks of a recorded run, each of which had its share of each block."""
    num_mamba_layers: int = 0
    """Mamba-2 layers of all pipeline stages. With any, or any of Gated DeltaNet, prompts are cut
    where scans are."""
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0
    num_delta_layers: int = 0
    """Gated DeltaNet layers of all pipeline stages."""
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    hidden_size: int = 0
    """Counts where each KV block keeps a hidden state: with `speculative_method="mtp"`."""
    mtp_pattern: str = ""
    mtp_num_depths: int = 0
    """Depths of multi-token prediction that were built, each with KV layers of its own."""
    windows: list[list[int]] = field(default_factory=list)
    """Keys that a token sees in each KV layer of each pipeline stage, 0 for all, the stage with
    most layers first; empty: all see all."""

    @property
    def hybrid_layer_pattern(self) -> str:
        """Layers that keep something of a request, in any order."""
        recurrent = MAMBA * self.num_mamba_layers + DELTA * self.num_delta_layers
        return recurrent + ATTENTION * self.num_layers

    @property
    def params_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return parse_dtype(self.dtype)

    @property
    def expert_model_parallel_size(self) -> int:
        """1: a simulation has no replicas that share experts with this one."""
        return 1

    @classmethod
    def of_architecture(cls, architecture: ModelArchitecture, dtype: str) -> ModelShape:
        """The shape of a model that a loader has described."""
        return cls(
            num_layers=architecture.count(ATTENTION),
            num_attention_heads=architecture.num_attention_heads,
            num_query_groups=architecture.num_query_groups,
            kv_channels=architecture.kv_channels,
            dtype=dtype,
            vocab_size=architecture.vocab_size,
            hidden_size=architecture.hidden_size,
            windows=_windows([list(architecture.attention_windows)]),
            **_recurrent_fields(architecture, architecture.pattern),
        )

    @classmethod
    def of_context(cls, context: DynamicInferenceContext, vocab_size: int) -> ModelShape:
        """The shape of the model that a context was made for."""
        model = context.model_config
        pattern = getattr(model, "hybrid_layer_pattern", None)
        if pattern is None:
            pattern = ATTENTION * model.num_layers
        return cls(
            num_layers=max(stage.count(ATTENTION) for stage in pattern.split("|")),
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            dtype=str(model.params_dtype).removeprefix("torch."),
            vocab_size=vocab_size,
            pipeline_model_parallel_size=getattr(model, "pipeline_model_parallel_size", 1),
            tensor_model_parallel_size=getattr(model, "tensor_model_parallel_size", 1),
            hidden_size=model.hidden_size,
            mtp_pattern=getattr(model, "mtp_pattern", ""),
            mtp_num_depths=getattr(model, "mtp_num_depths", 0),
            windows=_windows(layer_windows(model)),
            **_recurrent_fields(model, pattern),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)


def _windows(stages: list[list[int]]) -> list[list[int]]:
    return sorted(stages, key=len, reverse=True) if any(map(any, stages)) else []


def _recurrent_fields(model: Any, pattern: str) -> dict[str, Any]:
    """How many recurrent layers there are, and sizes of the kinds that there are."""
    counts = {
        "num_mamba_layers": pattern.count(MAMBA),
        "num_delta_layers": pattern.count(DELTA),
    }
    return counts | {
        name: getattr(model, name)
        for kind, sizes in SIZES_OF.items()
        if kind in pattern
        for name in sizes.FIELDS
    }
