"""`ModelShape`: what scheduling needs to know of a model, without the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from megatron_async.checkpoints.dtypes import parse_dtype
from megatron_async.device_state.device_memory import attention_layers
from megatron_async.models.architecture import ATTENTION, ModelArchitecture

if TYPE_CHECKING:
    from megatron_async.contexts.dynamic_context import DynamicInferenceContext


@dataclass(frozen=True)
class ModelShape:
    """Stands for Megatron's `TransformerConfig` in a `DynamicInferenceContext` without a model; it
    has its field names."""

    num_layers: int
    """Layers with a KV cache."""
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    dtype: str
    """Of the KV cache: "float32", "bfloat16" or "float16"."""
    vocab_size: int
    layernorm_epsilon: float = 1e-5
    pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: ClassVar[int] = 1

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
        )

    @classmethod
    def of_context(cls, context: DynamicInferenceContext, vocab_size: int) -> ModelShape:
        """The shape of the model that a context was made for."""
        model = context.model_config
        return cls(
            num_layers=attention_layers(model),
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            dtype=str(model.params_dtype).removeprefix("torch."),
            vocab_size=vocab_size,
            pipeline_model_parallel_size=getattr(model, "pipeline_model_parallel_size", 1),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)
