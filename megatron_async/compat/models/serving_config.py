"""The configuration that a user's model is served with, from Megatron's `TransformerConfig`.

A `GPTModel` counts an attention and an MLP as one layer, and Megatron's configuration says nothing
of a layer pattern; the engine's models are `HybridModel`s, whose pattern tells the context how many
layers have keys and values, or a recurrent state. The user's own object is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megatron.core.transformer.enums import InferenceCudaGraphScope
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MAMBA, MLP
from megatron_async.models.model_config import ModelConfig

THEIRS = frozenset(field.name for field in fields(TransformerConfig))
ADDED = tuple(field for field in fields(ModelConfig) if field.name not in THEIRS)
"""Fields that `ModelConfig` adds to Megatron's."""
SERVING: dict[str, Any] = {
    "transformer_impl": "local",
    "position_embedding_type": "none",
    "sequence_parallel": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "memory_efficient_layer_norm": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "enable_cuda_graph": False,
    "cuda_graph_impl": "none",
    "inference_cuda_graph_scope": InferenceCudaGraphScope.none,
    "mlp_chunks_for_prefill": 1,
    "recompute_granularity": None,
    "fine_grained_activation_offloading": False,
    "cpu_offloading": False,
    "moe_paged_stash": False,
    "mtp_num_layers": None,
}
"""Fields that belong to training, to how weights are first made, or to Megatron's own engine, and
what they are while the engine serves. None of them changes a token: sequence parallelism is another
place of the same sums, rope is applied by the engine's table (`models/rotary.py`), drafts never
change what is sampled."""


def serving_config(
    config: Any, layer_pattern: str | Sequence[str] | None = None, model: nn.Module | None = None
) -> ModelConfig:
    """What the engine's context and its layers are made from.

    A context is made before the model is known. For a `GPTModel` its configuration is enough. A
    `HybridModel`'s has no layer pattern: give `layer_pattern` (Megatron's scripts have it in
    `MambaInferenceStateConfig.layer_type_list`, where there are Mamba layers), or the model itself.
    Without either, what is returned counts every layer as attention, and has no pattern: the
    wrapper makes the context again when it knows (`served_model.py`).

    Args:
        config: Megatron's `TransformerConfig` of the model; a `ModelConfig` is returned as it is.
        layer_pattern: of a `HybridModel`, such as "M-*-", with "|" between pipeline stages; or a
            list of characters. None: the pattern of `model`, or of a `GPTModel`.
        model: a `HybridModel`, whose constructor was told the pattern; or a `GPTModel`.

    Returns:
        a new configuration; the user's one keeps its values.

    Raises:
        ConfigurationError: the configuration does not tell which layers there are.
    """
    if isinstance(config, ModelConfig) and config.hybrid_layer_pattern is not None:
        return config
    served = object.__new__(ModelConfig)  # its values are final: nothing is derived once more
    values = {field.name: field.default for field in ADDED} | vars(config) | SERVING
    for name, value in values.items():
        setattr(served, name, value)
    if layer_pattern is None and model is not None:
        layer_pattern = getattr(model, "hybrid_layer_pattern", None)
    if layer_pattern is None and config.is_hybrid_model:
        served.pipeline_model_parallel_size = 1  # nobody can tell where its stages begin
        return served
    if layer_pattern is None:
        pattern = gpt_pattern(config)
        if config.window_size is not None and config.window_attn_skip_freq is not None:
            name, count = "window_attn_skip_freq", config.num_layers
            listed = _by_frequency(name, config.window_attn_skip_freq, count, first=1)
            # Of a layer's two characters the first has the window.
            served.window_attn_skip_freq = [each for has in listed for each in (has, 0)]
    else:
        pattern = _main_pattern("".join(layer_pattern), config)
    served.hybrid_layer_pattern = pattern
    served.num_layers = len(pattern.replace("|", ""))
    served.init_model_with_meta_device = "|" in pattern  # as `build_model` does, and why
    served.pipeline_stage = _stage(config, model)
    if MAMBA in pattern and served.mamba_num_heads is None:
        # Megatron's mixer widens by two where nobody tells its heads.
        served.mamba_num_heads = 2 * config.hidden_size // config.mamba_head_dim
    return served


def gpt_pattern(config: TransformerConfig) -> str:
    """The layers of a `GPTModel` in a hybrid pattern, two characters a layer, "|" between pipeline
    stages: attention or Gated DeltaNet, then an MLP or experts."""
    count = config.num_layers
    mixers, experts = _mixers(config, count), _experts(config, count)
    layers = [
        (DELTA if linear else ATTENTION) + (EXPERTS if sparse else MLP)
        for linear, sparse in zip(mixers, experts, strict=True)
    ]
    stages = config.pipeline_model_parallel_size
    if stages == 1:
        return "".join(layers)
    if config.pipeline_model_parallel_layout is not None:
        raise ConfigurationError(
            "pipeline_model_parallel_layout is not served: leave it out, so that layers are "
            "spread evenly (or by num_layers_in_first_pipeline_stage and ..._last_...)."
        )
    if (config.virtual_pipeline_model_parallel_size or 1) > 1:
        raise ConfigurationError(
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size} "
            "is not served: build the model for inference without it."
        )
    sizes = [get_num_layers_to_build(config, pp_rank=rank) for rank in range(stages)]
    parts = [layers[sum(sizes[:rank]) :][: sizes[rank]] for rank in range(stages)]
    return "|".join("".join(part) for part in parts)


def _mixers(config: TransformerConfig, count: int) -> list[int]:
    """For each layer whether it is a Gated DeltaNet."""
    if config.experimental_attention_variant != "gated_delta_net":
        return [0] * count
    return _by_frequency("linear_attention_freq", config.linear_attention_freq, count, first=1)


def _experts(config: TransformerConfig, count: int) -> list[int]:
    """For each layer whether it has experts."""
    if not config.num_moe_experts:
        return [0] * count
    return _by_frequency("moe_layer_freq", config.moe_layer_freq, count, first=0)


def _by_frequency(name: str, value: Any, count: int, first: int) -> list[int]:
    """Megatron's two ways to say which layers are of another kind: a list, or every n-th; `first`
    is 0 where of every n layers the first is, 1 where all but the last are."""
    if isinstance(value, int) and value > 0:
        if first:
            return [int((layer + 1) % value != 0) for layer in range(count)]
        return [int(layer % value == 0) for layer in range(count)]
    if not isinstance(value, list) or len(value) != count:
        raise ConfigurationError(
            f"{name}={value!r} must be a positive integer, or a list of {count} for the model's "
            f"{count} layers."
        )
    return [int(bool(one)) for one in value]


def _main_pattern(pattern: str, config: TransformerConfig) -> str:
    """The layers of a `HybridModel`'s trunk, with "|" where Megatron splits it."""
    trunk = pattern.split("/")[0]
    stages = config.pipeline_model_parallel_size
    if stages == 1 or "|" in trunk:
        return trunk if stages > 1 else trunk.replace("|", "")
    uneven = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    size, rest = divmod(len(trunk), stages)
    if rest or uneven != (None, None):
        raise ConfigurationError(
            f"the layer pattern {trunk!r} does not say where its {stages} pipeline stages begin: "
            "put '|' between them."
        )
    return "|".join(trunk[start : start + size] for start in range(0, len(trunk), size))


def _stage(config: TransformerConfig, model: nn.Module | None) -> int:
    """Pipeline stage of this process, by the model's own groups, or by Megatron's."""
    if config.pipeline_model_parallel_size == 1:
        return 0
    group = getattr(getattr(model, "pg_collection", None), "pp", None)
    if group is not None:
        return int(group.rank())
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())
