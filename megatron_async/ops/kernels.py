"""Which implementation of each hot-path op a device gets: Triton on a GPU, else plain torch and,
for a few, loops compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_async.ops.attention import output_gate, rope_append
from megatron_async.ops.cpu import rows
from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.cpu.recurrent import host_flush, host_recurrent
from megatron_async.ops.cpu.sampling import host_sampling
from megatron_async.ops.drafting import hidden_states, ngram_lookup, store_drafts
from megatron_async.ops.experts import expert_mlp, expert_routing, few_tokens, shared_gate
from megatron_async.ops.linear import rms_norm, skinny_linear, squared_relu, swiglu
from megatron_async.ops.ranks import vocab_embedding
from megatron_async.ops.recurrent import (
    bases,
    delta_decode,
    delta_prefill,
    delta_reference,
    flush,
    gated_head_norm,
    gated_rms_norm,
    mamba_decode,
    mamba_prefill,
    mamba_reference,
)
from megatron_async.ops.sampling import (
    log_probs,
    logits_processing,
    sampling,
    token_mask,
    triton_log_probs,
    triton_logits,
    triton_sampling,
)


@dataclass(frozen=True)
class Kernels:
    """Ops of a step other than attention; the modules with their names describe the shapes."""

    vocab_embedding: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_append: Callable[..., Tensor]
    output_gate: Callable[[Tensor, Tensor, int], Tensor]
    linear: Callable[..., Tensor]
    linear_rope_append: Callable[..., Tensor]
    linear_swiglu: Callable[..., Tensor]
    linear_squared_relu: Callable[..., Tensor]
    swiglu: Callable[[Tensor], Tensor]
    squared_relu: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]
    sample_with_cuts: Callable[..., tuple[Tensor, Any]]
    best_tokens: Callable[..., tuple[Tensor, Tensor]]
    begin_chunks: Callable[..., None]
    process_logits: Callable[..., Tensor]
    count_tokens: Callable[..., None]
    log_probs: Callable[..., None]
    apply_token_mask: Callable[[Tensor, Tensor], None]
    route: Callable[..., expert_routing.Routing]
    expert_mlp: Callable[..., Tensor]
    few_token_experts: Callable[..., tuple[Tensor, expert_routing.Routing]]
    add_shared_expert: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    next_bases: Callable[..., tuple[Tensor, Tensor]]
    flush: Callable[..., None]
    mamba_decode: Callable[..., Tensor]
    mamba_prefill: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    delta_decode: Callable[..., Tensor]
    delta_prefill: Callable[..., Tensor]
    gated_head_norm: Callable[..., Tensor]
    ngram_drafts: Callable[..., Tensor]
    store_drafts: Callable[..., None]
    keep_hidden: Callable[..., None]
    gather_hidden: Callable[[Tensor, Tensor, Tensor], Tensor]


TORCH_KERNELS = Kernels(
    vocab_embedding.vocab_embedding_reference,
    rms_norm.add_rms_norm_reference,
    rope_append.rope_append_reference,
    output_gate.output_gate_reference,
    skinny_linear.linear_reference,
    skinny_linear.linear_rope_append_reference,
    skinny_linear.linear_swiglu_reference,
    skinny_linear.linear_squared_relu_reference,
    swiglu.swiglu_reference,
    squared_relu.squared_relu_reference,
    sampling.sample_reference,
    sampling.sample_with_cuts_reference,
    sampling.best_tokens_reference,
    logits_processing.begin_chunks_reference,
    logits_processing.process_logits_reference,
    logits_processing.count_tokens_reference,
    log_probs.log_probs_reference,
    token_mask.apply_token_mask_reference,
    expert_routing.route_reference,
    expert_mlp.expert_mlp_reference,
    few_tokens.few_token_experts_reference,
    shared_gate.add_shared_expert_reference,
    bases.next_bases_reference,
    flush.flush_reference,
    mamba_reference.mamba_decode_reference,
    mamba_reference.mamba_prefill_reference,
    gated_rms_norm.gated_rms_norm_reference,
    delta_reference.delta_decode_reference,
    delta_reference.delta_prefill_reference,
    gated_head_norm.gated_head_norm_reference,
    ngram_lookup.ngram_drafts_reference,
    store_drafts.store_drafts_reference,
    hidden_states.keep_hidden_reference,
    hidden_states.gather_hidden_reference,
)
TRITON_KERNELS = Kernels(
    vocab_embedding.vocab_embedding,
    rms_norm.add_rms_norm,
    rope_append.rope_append,
    output_gate.output_gate,
    skinny_linear.linear,
    skinny_linear.linear_rope_append,
    skinny_linear.linear_swiglu,
    skinny_linear.linear_squared_relu,
    swiglu.swiglu,
    squared_relu.squared_relu,
    triton_sampling.sample,
    triton_sampling.sample_with_cuts,
    triton_sampling.best_tokens,
    triton_logits.begin_chunks,
    triton_logits.process_logits,
    triton_logits.count_tokens,
    triton_log_probs.log_probs,
    token_mask.apply_token_mask,
    expert_routing.route,
    expert_mlp.expert_mlp,
    few_tokens.few_token_experts,
    shared_gate.add_shared_expert,
    bases.next_bases,
    flush.flush,
    mamba_decode.mamba_decode,
    mamba_prefill.mamba_prefill,
    gated_rms_norm.gated_rms_norm,
    delta_decode.delta_decode,
    delta_prefill.delta_prefill,
    gated_head_norm.gated_head_norm,
    ngram_lookup.ngram_drafts,
    store_drafts.store_drafts,
    hidden_states.keep_hidden,
    hidden_states.gather_hidden,
)
CPU_KERNELS = replace(
    TORCH_KERNELS,
    add_rms_norm=rows.add_rms_norm,
    rope_append=rows.rope_append,
    swiglu=rows.swiglu,
    sample=host_sampling.sample,
    sample_with_cuts=host_sampling.sample_with_cuts,
    best_tokens=host_sampling.best_tokens,
    log_probs=host_sampling.log_probs,
    next_bases=host_flush.next_bases,
    flush=host_flush.flush,
    mamba_decode=host_recurrent.mamba_decode,
    gated_rms_norm=rows.gated_rms_norm,
    delta_decode=host_recurrent.delta_decode,
    gated_head_norm=rows.gated_head_norm,
)


def kernels_for(tensor: Tensor) -> Kernels:
    """The ops for a tensor's device."""
    if tensor.is_cuda:
        return TRITON_KERNELS
    return CPU_KERNELS if compiles() else TORCH_KERNELS
