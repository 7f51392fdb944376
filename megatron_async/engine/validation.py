"""Decide whether a request can ever be served, before it takes resources."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_async.errors import PoolTooSmall, PromptTooLong, RequestError, SequenceTooLong
from megatron_async.models.partition import routed_layers
from megatron_async.planning.admission import MAX_PRIORITY
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams

logger = logging.getLogger("megatron_async")


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a servable request, from the settings of its engine."""

    seed: int
    max_length: int
    """Sequence length at which the request ends, tokens."""
    drafts: int
    """Most drafts that a step verifies."""


def check_request_id(request_id: Any) -> int:
    """The id as a Python integer.

    Raises:
        RequestError: not an integer of 64 bits.
    """
    is_integer = isinstance(request_id, numbers.Integral) and not isinstance(request_id, bool)
    if not is_integer or not -(2**63) <= request_id < 2**63:
        raise RequestError(
            f"request id {request_id!r} is not allowed: it must be an integer, -2**63 to 2**63 - 1."
        )
    return int(request_id)


def check_priority(priority: Any) -> int:
    """The priority as a Python integer.

    Raises:
        RequestError: not an integer, or too large.
    """
    is_integer = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
    if not is_integer or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority={priority!r} is not allowed: it must be an integer from {-MAX_PRIORITY} to "
            f"{MAX_PRIORITY}; 0 is the default and higher is served earlier."
        )
    return int(priority)


def check_params_type(params: Any) -> None:
    """Raise RequestError unless `params` is a `SamplingParams` or None."""
    if params is not None and not isinstance(params, SamplingParams):
        kind = type(params)
        raise RequestError(
            f"sampling_params is a {kind.__module__}.{kind.__qualname__}: give a "
            "megatron_async.SamplingParams, or None for the defaults."
        )


def require_detokenizer(tokenizer: Any) -> Callable[[list[int]], str]:
    """The tokenizer's `detokenize`, for a request with stop words.

    Raises:
        RequestError: there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError(
            "stop_words are matched on text, but this engine has no tokenizer: give it one, or use "
            "stop_token_ids."
        )
    return tokenizer.detokenize


def prompt_to_array(prompt: Any, vocab_size: int) -> np.ndarray:
    """Token ids of a prompt as int32 `[length]`.

    Args:
        prompt: list, tuple, NumPy array or CPU tensor of token ids.
        vocab_size: ids run from 0 to vocab_size - 1.

    Raises:
        RequestError: empty, not integers, or an id out of range.
    """
    if isinstance(prompt, torch.Tensor) and prompt.device.type != "cpu":
        # Reading it would wait for the device and everything queued there.
        raise RequestError(
            f"the prompt is a tensor on {prompt.device}: give its token ids on the CPU."
        )
    try:
        tokens = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        kind = type(prompt).__name__
        raise RequestError(f"a prompt of type {kind} is not a list of token ids.") from error
    if tokens.size == 0:
        raise RequestError("the prompt is empty: give at least one token.")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(
            f"a prompt of token ids must be a flat list of integers, not {tokens.ndim}-dimensional "
            f"{tokens.dtype}."
        )
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        where = int(np.argmax(bad))
        raise RequestError(
            f"token id {tokens[where]} at position {where} of the prompt is out of range: this "
            f"model's ids run from 0 to {vocab_size - 1}."
        )
    return tokens.astype(np.int32)


def check_forced_routing(
    params: SamplingParams, prompt: int, model: Any
) -> NDArray[np.int16] | None:
    """Check `forced_routing` for a prompt of so many tokens, and leave its bytes in `params`, for
    other ranks. What the prompt leaves in the cache is only for requests that force the same.

    Returns:
        `[positions, layers, topk]`; None if nothing is forced.

    Raises:
        RequestError: names what is wrong, and where.
    """
    given = params.forced_routing
    if given is None:
        return None
    if not (layers := sum(routed_layers(model))):
        raise RequestError(
            "forced_routing is for models that have layers with experts: leave it None."
        )
    topk, experts = model.moe_router_topk, model.num_moe_experts
    try:
        if isinstance(given, bytes):
            given = np.frombuffer(given, "<i2").reshape(-1, layers, topk)
        found = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise RequestError(f"forced_routing is no array of expert ids: {error}.") from error
    if found.shape[1:] != (layers, topk) or len(found) > prompt or found.dtype.kind not in "iu":
        raise RequestError(
            f"forced_routing of shape {found.shape} and dtype {found.dtype} is not allowed: it "
            f"must be integers [positions, {layers}, {topk}], for at most the prompt's {prompt} "
            "positions."
        )
    rows = found.reshape(-1, topk).astype(np.int64)
    ordered = np.sort(rows, axis=1)
    is_wrong = (rows < 0).any(1) | (rows >= experts).any(1)
    is_wrong |= (ordered[:, 1:] == ordered[:, :-1]).any(1)
    is_wrong &= (rows != -1).any(1)
    if is_wrong.any():
        where = int(np.argmax(is_wrong))
        raise RequestError(
            f"forced_routing of position {where // layers} in layer {where % layers} is "
            f"{[*map(int, rows[where])]}: give different experts from 0 to {experts - 1}, or -1 in "
            "all places for the router's choice."
        )
    params.forced_routing = found.astype("<i2").tobytes()
    content = (params.cache_salt or "").encode() + b"\0" + params.forced_routing
    params.cache_salt = blake2b(content, digest_size=16).hexdigest()
    return found.astype(np.int16)


def check_request(
    request: DynamicInferenceRequest, context: DynamicInferenceContext, vocab_size: int
) -> RequestLimits:
    """Check a request against the limits of the engine.

    Raises:
        RequestError: names the value and the remedy; `SequenceTooLong`, `PromptTooLong` or
            `PoolTooSmall` if the request exceeds a limit of the engine.
    """
    params, config = request.sampling_params, context.config
    params.validate(vocab_size)
    prompt = len(request.prompt_tokens)
    request.forced_routing = check_forced_routing(params, prompt, context.model_config)
    if params.return_routing and not config.enable_routing_replay:
        raise RequestError(
            "return_routing=True needs an engine that records it: start it with "
            "enable_routing_replay=True (--enable-routing-replay)."
        )
    longest = context.max_sequence_length
    if prompt > longest - (not params.is_score):
        more = "" if params.is_score else " and at least one generated token"
        raise SequenceTooLong(
            f"the prompt has {prompt} tokens, but max_sequence_length={longest} must hold it{more}"
            ": shorten the prompt or raise max_sequence_length."
        )
    if (first := params.prompt_log_probs_from) >= prompt:
        raise RequestError(
            f"prompt_log_probs_from={first} is behind the prompt's {prompt} tokens, 0 to "
            f"{prompt - 1}: lower it, or set skip_prompt_log_probs=True."
        )
    if prompt > context.max_tokens and not config.enable_chunked_prefill:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens, more than max_tokens={context.max_tokens} of one "
            "step: set enable_chunked_prefill=True or raise max_tokens."
        )
    if params.num_tokens_total is not None:
        max_length = params.num_tokens_total
        if max_length <= prompt:
            raise SequenceTooLong(
                f"num_tokens_total={max_length} leaves nothing to generate after a prompt of "
                f"{prompt} tokens: raise it, or give num_tokens_to_generate."
            )
    elif params.num_tokens_to_generate is not None:
        max_length = prompt + params.num_tokens_to_generate
    else:
        needs, total = context.slots.needs, context.blocks.total
        fitting = needs.longest(total, context.slots.columns)
        max_length = min(longest, fitting * context.block_size_tokens + 1)
    if max_length > longest:
        # As in Megatron: a wish beyond the longest sequence is cut, not refused.
        _tell_of_cut(longest)
        max_length = longest
    # The last token is never fed back, so it needs no place in the cache.
    blocks = context.slots.needs.of(-(-(max_length - 1) // context.block_size_tokens))
    if blocks > context.blocks.total:
        pool = context.blocks.total * context.block_size_tokens
        raise PoolTooSmall(
            f"the request may reach {max_length} tokens and so needs {blocks} KV blocks, but the "
            f"whole pool has {context.blocks.total} ({pool} tokens): lower num_tokens_to_generate, "
            "or raise num_kv_blocks or buffer_size_gb."
        )
    seed = params.seed
    if seed is None:
        seed = _mix(config.inference_sampling_seed, request.request_id)
    return RequestLimits(seed, max_length, _drafts(params, config.num_speculative_tokens))


@cache
def _tell_of_cut(longest: int) -> None:
    """Log, once for each limit, that requests asked for more than the longest sequence."""
    logger.warning(
        "a request asks for more tokens than max_sequence_length=%d allows beside its prompt: it "
        "ends there, with finish_reason 'length' (said once)",
        longest,
    )


def _drafts(params: SamplingParams, most: int) -> int:
    """Most drafts of a request of an engine with `most`."""
    wanted = params.num_speculative_tokens
    if wanted is not None and wanted > most:
        raise RequestError(
            f"num_speculative_tokens={wanted} is more than the engine's {most}: lower it, or "
            "raise the engine's (InferenceConfig.num_speculative_tokens, with speculative_method)."
        )
    if params.structured_output is not None:
        return 0
    return most if wanted is None else int(wanted)


def _mix(seed: int, request_id: int) -> int:
    """Seed of a request without one: SplitMix64's finalizer (Steele et al. 2014) over both numbers,
    cut to 63 bits, so that neighbouring ids get unrelated seeds."""
    mask = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + request_id + 1) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 1
