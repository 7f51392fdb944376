"""`Ops`: all ops of the hot path, bound once to the implementations of an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

import megatron_async.ops.triton_run  # noqa: F401  # of all kernels' launches
from megatron_async.ops.attention.output_gate import output_gate
from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.drafting.draft_tokens import lay_out_draft, lay_out_entries
from megatron_async.ops.drafting.hidden_states import gather_hidden, keep_hidden
from megatron_async.ops.drafting.ngram_lookup import ngram_drafts
from megatron_async.ops.drafting.store_drafts import store_drafts
from megatron_async.ops.experts.expert_mlp import expert_mlp
from megatron_async.ops.experts.expert_routing import route
from megatron_async.ops.experts.few_tokens import few_token_experts
from megatron_async.ops.experts.routing_record import keep_routing
from megatron_async.ops.experts.shared_gate import add_shared_expert
from megatron_async.ops.linear.activations import squared_relu, swiglu
from megatron_async.ops.linear.products import product
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.op import Op, Place
from megatron_async.ops.ranks.vocab_embedding import vocab_embedding
from megatron_async.ops.recurrent.bases import next_bases
from megatron_async.ops.recurrent.delta_reference import delta_decode, delta_prefill
from megatron_async.ops.recurrent.flush import flush
from megatron_async.ops.recurrent.gated_norms import gated_head_norm, gated_rms_norm
from megatron_async.ops.recurrent.mamba_reference import mamba_decode, mamba_prefill
from megatron_async.ops.sampling.log_probs import log_probs
from megatron_async.ops.sampling.logits_processing import begin_chunks, count_tokens, process_logits
from megatron_async.ops.sampling.sampling import best_tokens, sample
from megatron_async.ops.sampling.token_mask import apply_token_mask


class Ops:
    """The ops of one engine, each under its name: with the signature of its reference, which
    documents it.

    Args:
        device: Triton serves a GPU; loops that Numba compiles a CPU, where Numba may compile; plain
            torch all else.
        promises: what all ops must keep; names of `op.PROMISES`. An op of which no implementation
            for the device keeps them says so when it is called.
        place: whose implementations are bound; None: the device's. Triton's interpreter runs those
            of "gpu" on a CPU.

    Attributes:
        major: compute capability of the GPU, whose rules choose products; 0: a CPU.
        is_invariant: whether "invariant" is among the promises.

    Raises:
        ConfigurationError: an op has no implementation for the device, or a promise is unknown.
    """

    def __init__(
        self,
        device: torch.device,
        promises: frozenset[str] = frozenset(),
        place: Place | None = None,
    ) -> None:
        if place is None:
            place = _place_of(device)
        is_gpu = device.type == "cuda"
        self.major = torch.cuda.get_device_capability(device)[0] if is_gpu else 0

        self.is_invariant = "invariant" in promises

        def bound[**P, R](op: Op[P, R]) -> Callable[P, R]:
            if not promises:
                return op.on(place)
            return op.find(place, promises) or _refusal(op, place, promises)

        self.vocab_embedding = bound(vocab_embedding)
        self.add_rms_norm = bound(add_rms_norm)
        self.rope_append = bound(rope_append)
        self.output_gate = bound(output_gate)
        self.product = bound(product)
        self.swiglu = bound(swiglu)
        self.squared_relu = bound(squared_relu)
        self.sample = bound(sample)
        self.best_tokens = bound(best_tokens)
        self.begin_chunks = bound(begin_chunks)
        self.process_logits = bound(process_logits)
        self.count_tokens = bound(count_tokens)
        self.log_probs = bound(log_probs)
        self.apply_token_mask = bound(apply_token_mask)
        self.route = bound(route)
        self.expert_mlp = bound(expert_mlp)
        self.few_token_experts = bound(few_token_experts)
        self.add_shared_expert = bound(add_shared_expert)
        self.keep_routing = bound(keep_routing)
        self.next_bases = bound(next_bases)
        self.flush = bound(flush)
        self.mamba_decode = bound(mamba_decode)
        self.mamba_prefill = bound(mamba_prefill)
        self.gated_rms_norm = bound(gated_rms_norm)
        self.delta_decode = bound(delta_decode)
        self.delta_prefill = bound(delta_prefill)
        self.gated_head_norm = bound(gated_head_norm)
        self.ngram_drafts = bound(ngram_drafts)
        self.store_drafts = bound(store_drafts)
        self.lay_out_entries = bound(lay_out_entries)
        self.lay_out_draft = bound(lay_out_draft)
        self.keep_hidden = bound(keep_hidden)
        self.gather_hidden = bound(gather_hidden)


def _place_of(device: torch.device) -> Place:
    if device.type == "cuda":
        return "gpu"
    return "cpu" if device.type == "cpu" and compiles() else "torch"


def _refusal[**P, R](op: Op[P, R], place: Place, promises: frozenset[str]) -> Callable[P, R]:
    def refuse(*args: P.args, **kwargs: P.kwargs) -> R:
        return op.on(place, promises)(*args, **kwargs)  # raises

    return refuse
