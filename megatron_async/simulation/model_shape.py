"""`ModelShape`: what scheduling needs to know of a model, without the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.checkpoints.dtypes import parse_dtype
from megatron_async.models.architecture import ATTENTION, MAMBA, ModelArchitecture

if TYPE_CHECKING:
    from megatron_async.contexts.dynamic_context import DynamicInferenceContext


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
    """Of the KV cache: "float32", "bfloat16" or "float16"."""
    vocab_size: int
    layernorm_epsilon: float = 1e-5
    pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    """Of a recorded run: its ranks held so much less of each block."""
    num_mamba_layers: int = 0
    """Mamba-2 layers of all pipeline stages. With any, prompts are cut where scans are."""
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0

    @property
    def hybrid_layer_pattern(self) -> str:
        """Layers that keep something of a request, in any order."""
        return MAMBA * self.num_mamba_layers + ATTENTION * self.num_layers

    @property
    def params_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return parse_dtype(self.dtype)

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
            num_mamba_layers=architecture.count(MAMBA),
            **_mamba_fields(architecture),
        )

    @classmethod
    def of_context(cls, context: DynamicInferenceContext, vocab_size: int) -> ModelShape:
        """The shape of the model that a context was made for."""
        model = context.model_config
        pattern = getattr(model, "hybrid_layer_pattern", None)
        if pattern is None:
            pattern = ATTENTION * model.num_layers
        mamba_layers = pattern.count(MAMBA)
        return cls(
            num_layers=max(stage.count(ATTENTION) for stage in pattern.split("|")),
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            dtype=str(model.params_dtype).removeprefix("torch."),
            vocab_size=vocab_size,
            pipeline_model_parallel_size=getattr(model, "pipeline_model_parallel_size", 1),
            tensor_model_parallel_size=getattr(model, "tensor_model_parallel_size", 1),
            num_mamba_layers=mamba_layers,
            **(_mamba_fields(model) if mamba_layers else {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)


def _mamba_fields(model: Any) -> dict[str, int]:
    """Of an architecture or Megatron's configuration, under the same names."""
    names = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
    return {name: getattr(model, name) for name in names}
