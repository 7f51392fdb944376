"""Check that a served model computes what its configuration and its constructor specify.

The modules of this package replace Megatron's, with fewer options. An option that they do not serve
is refused here by name: if it were ignored, tokens would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import KINDS
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.models.linear import SharedLinear
from megatron_async.models.mlp import UNGATED, InferenceMLP, gating_of
from megatron_async.models.moe import MoELayer, TopKRouter
from megatron_async.models.norm import InferenceRMSNorm
from megatron_async.models.partition import layer_windows, local_heads, recurrent_layers
from megatron_async.models.recurrent_layers import RecurrentMixer
from megatron_async.models.rotary import LEARNED, rotary_of
from megatron_async.models.sizes import SIZES_OF
from megatron_async.ops.linear.products import choose_for

ATTENTION = {
    "multi_latent_attention": False,
    "flash_decode": False,
    "context_parallel_size": 1,
    "fp8": None,
    "fp4": None,
}
"""Fields of `TransformerConfig` and the one value of each that `PagedSelfAttention` serves."""
STACK = {"fp32_residual_connection": False, "apply_residual_connection_post_layernorm": False}
"""Fields of `TransformerConfig` and the one value of each that `PagedHybridStack` serves."""
NORMS = {"normalization": "RMSNorm"}
"""Fields and the one value of each that `make_norm` serves: the norms of `PagedHybridStack` itself,
not of its subclasses."""
EXPERTS = {
    "moe_router_num_groups": None,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
}
"""Fields and the one value of each that `MoELayer` serves."""
ROWS = (1, 17, 65, 2048)
"""Rows of which a weight's products are asked: one of each class of kernels."""
OURS = "build the model with transformer_impl='local', or with megatron_async.models.hybrid"


def check_model(model: nn.Module, config: Any, settings: InferenceConfig) -> None:
    """Check that no option of a model would be ignored.

    Args:
        model: with `PagedSelfAttention` layers.
        config: the `TransformerConfig` that its context was made from.
        settings: of the engine.

    Raises:
        ConfigurationError: names all options that are not served.
    """
    refuse([*_positions(model, settings), *_modules(model, config, settings)])


def refuse(reasons: list[str]) -> None:
    """Raise ConfigurationError with the reasons not to serve a model, if there are any."""
    if reasons:
        raise ConfigurationError(
            f"this model is not served, because of {'; '.join(dict.fromkeys(reasons))}. Change "
            "that, or serve the model with Megatron-Core's own engine."
        )


def _positions(model: nn.Module, settings: InferenceConfig) -> Iterator[str]:
    kind, rotary = getattr(model, "position_embedding_type", "none"), rotary_of(model)
    config: Any = getattr(model, "config", None)
    if rotary is not None and type(rotary) not in (RotaryEmbedding, YarnRotaryEmbedding):
        yield f"position_embedding_type={kind!r} ({type(rotary).__name__})"
    elif rotary is None and kind not in ("none", LEARNED):
        yield f"position_embedding_type={kind!r} without a rotary_pos_emb"
    described = kind == "none" and hasattr(config, "rotary_base")
    if rotary is None and not described and not hasattr(model, "position_embedding_type"):
        yield "a position_embedding_type that neither it nor its configuration tells"
    rotates = rotary is not None or described
    if rotates and (config.rotary_interleaved or getattr(rotary, "rotary_interleaved", False)):
        yield "rotary_interleaved=True"
    longest = getattr(model, "max_sequence_length", settings.max_sequence_length)
    if kind == LEARNED and longest < settings.max_sequence_length:
        yield (
            f"max_sequence_length={settings.max_sequence_length}, as it has learnt {longest} "
            "positions"
        )


def _modules(model: nn.Module, config: Any, settings: InferenceConfig) -> Iterator[str]:
    mixers = sum(isinstance(module, RecurrentMixer) for module in model.modules())
    if mixers and mixers != len(recurrent_layers(config)):
        yield (
            f"{mixers} recurrent layers, where the context has room for "
            f"{len(recurrent_layers(config))}: only a HybridModel's pattern tells of them"
        )
    for module in model.modules():
        mine: Any = getattr(module, "config", None)
        if isinstance(module, InferenceRMSNorm):
            yield from _factors(module, config)
        if isinstance(module, PagedSelfAttention) and mine is not None:
            yield from _unserved(mine, ATTENTION)
            yield from _window(mine, config)
            yield from _heads(module, config)
            yield from _query_and_key_norms(module, config)
        elif isinstance(module, PagedHybridStack):
            yield from _unserved(mine, STACK)
            if type(module) is PagedHybridStack:
                yield from _unserved(mine, NORMS)
        elif isinstance(module, RecurrentMixer):
            yield from _mixer(module, config)
            yield from _unserved(mine, module.served)
        elif isinstance(module, InferenceMLP):
            yield from strange_activation(mine)
        elif isinstance(module, MoELayer):
            yield from _unserved(mine, EXPERTS)
            yield from strange_activation(mine)
            yield from _router(module)
    decoder = getattr(model, "decoder", None)
    foreign = decoder is not None and not isinstance(decoder, PagedHybridStack)
    if config.sequence_parallel and foreign:
        yield "sequence_parallel=True with other layers than those of models.hybrid"


def _unserved(config: Any, served: Mapping[str, Any]) -> Iterator[str]:
    for name, value in served.items():
        mine = getattr(config, name)
        if mine != value and not (value is None and not mine):
            yield f"{name}={getattr(mine, '__name__', repr(mine))}"


def strange_activation(config: Any) -> Iterator[str]:
    """An activation that no MLP or expert here has, if a configuration names one."""
    gated, mine = config.gated_linear_unit, config.activation_func
    if gated and gating_of(config) is not None:
        return
    for name in () if gated else ("activation_func_clamp_value", "glu_linear_offset"):
        if getattr(config, name):
            yield f"{name}={getattr(config, name)} without a gate"
    if gated or mine is not UNGATED:
        name = getattr(mine, "__name__", repr(mine))
        yield f"activation_func={name} with gated_linear_unit={config.gated_linear_unit}"


def _router(module: MoELayer) -> Iterator[str]:
    config: Any = module.config
    function, has_bias = config.moe_router_score_function, config.moe_router_enable_expert_bias
    if function not in ("softmax", "sigmoid"):
        yield f"moe_router_score_function={function!r}"
    if has_bias and function != "sigmoid":
        yield f"moe_router_enable_expert_bias=True with moe_router_score_function={function!r}"
    if config.moe_shared_expert_gate and module.shared_experts is None:
        yield "moe_shared_expert_gate=True without a shared expert"
    if config.add_bias_linear and module.shared_experts is not None:
        yield "add_bias_linear=True with a shared expert"
    built = module.router.expert_bias is not None, module.shared_experts is not None
    if built != (bool(has_bias), bool(config.moe_shared_expert_intermediate_size)):
        yield "an expert bias or a shared expert that its configuration tells otherwise"


def _mixer(module: RecurrentMixer[Any], config: Any) -> Iterator[str]:
    room = SIZES_OF[module.kind].of(config).of_rank(module.tp_group.size())
    if module.sizes != room:
        yield (
            f"a layer's {KINDS[module.kind]} sizes {module.sizes!r}, where the context has room "
            f"for {room!r}"
        )
    if module.config.context_parallel_size != 1:
        yield f"context_parallel_size={module.config.context_parallel_size}"


def _is_zero_centered(norm: Any, config: Any) -> bool:
    """Whether a norm that is not ours multiplies by 1 + weight, by its own word or the model's."""
    return bool(getattr(norm, "zero_centered_gamma", config.layernorm_zero_centered_gamma))


def _factors(module: InferenceRMSNorm, config: Any) -> Iterator[str]:
    if module.is_zero_centered != config.layernorm_zero_centered_gamma:
        yield (
            f"layernorm_zero_centered_gamma={config.layernorm_zero_centered_gamma}, which a norm "
            "of it was not built for"
        )


def _window(mine: Any, config: Any) -> Iterator[str]:
    window, skips = mine.window_size, mine.window_attn_skip_freq
    if window is not None and window[0] >= 0 and window[1] != 0:
        yield f"window_size={window}, where (keys before a token, 0) is served"
    same = (window, skips) == (config.window_size, config.window_attn_skip_freq)
    if not same and layer_windows(mine) != layer_windows(config):
        yield (
            f"a layer's window_size={window} with window_attn_skip_freq={skips}, where the context "
            f"has windows of {layer_windows(config)} keys (0 is all)"
        )


def _heads(module: PagedSelfAttention, config: Any) -> Iterator[str]:
    if module.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        yield f"attn_mask_type={module.attn_mask_type.name} in its layer spec, where causal is due"
    heads, kv_heads = local_heads(config)
    found = (
        module.num_attention_heads_per_partition,
        module.num_query_groups_per_partition,
        module.hidden_size_per_attention_head,
    )
    if found != (heads, kv_heads, config.kv_channels):
        yield (
            f"a layer's query heads, KV heads and their size {found}, where the context has room "
            f"for {(heads, kv_heads, config.kv_channels)}"
        )


def _query_and_key_norms(module: PagedSelfAttention, config: Any) -> Iterator[str]:
    norms = [norm for norm in (module.q_layernorm, module.k_layernorm) if norm is not None]
    if len(norms) == 1:
        yield "a norm of queries or keys, where only both are served"
    for norm in norms:
        kind, eps = type(norm).__name__, config.layernorm_epsilon
        if not kind.endswith("RMSNorm"):
            yield f"a {kind} of query and key heads, where RMSNorm is served"
        elif not isinstance(norm, InferenceRMSNorm) and _is_zero_centered(norm, config):
            yield "layernorm_zero_centered_gamma=True for query and key heads"
        elif getattr(norm, "eps", eps) != eps:
            yield f"an epsilon of {norm.eps} for query and key heads, where the others have {eps}"


def check_invariant_layers(model: nn.Module, major: int) -> None:
    """Refuse a model whose steps would multiply in an order that follows their rows.

    Args:
        model: on the device, its weights of the right shape, with or without values.
        major: compute capability of the GPU; 0: a CPU.

    Raises:
        ConfigurationError: names the first layer, and why.
    """
    decoder: Any = getattr(model, "decoder", None)
    if type(decoder) is not PagedHybridStack:
        kind = type(decoder).__name__
        raise _refused("decoder", f"a {kind} rounds where its own kernels do", OURS)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name == "output_layer" and weight is None:
            weight = model.shared_embedding_or_output_weight()  # type: ignore[operator]
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if isinstance(module, SharedLinear):
            if module.form is not None:
                problem = f"its weight is kept as {module.form.words}"
                raise _refused(name, problem, "use quantization='none'")
            if not all(_is_invariant(module, weight, rows, major) for rows in ROWS):
                shape, dtype = tuple(weight.shape), str(weight.dtype).removeprefix("torch.")
                problem = f"no kernel of one order multiplies by a {dtype} weight of {shape}"
                raise _refused(
                    name, problem, "contiguous rows of a multiple of 16 bytes are served"
                )
        elif not isinstance(module, (TopKRouter, nn.Embedding, VocabParallelEmbedding)):
            raise _refused(name, f"a {type(module).__name__} multiplies by its own kernels", OURS)


def _is_invariant(module: Any, weight: Tensor, rows: int, major: int) -> bool:
    x = torch.empty((rows, weight.size(1)), dtype=weight.dtype, device="meta")
    bias = module.bias is not None
    return choose_for(x, weight, major=major, bias=bias, invariant=True).met.invariant


def _refused(name: str, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"batch_invariant_mode=True is not served with the layer {name!r}: {problem} ({remedy}). "
        "Leave the mode out for this model, and train it with Megatron-Core's own forward."
    )
