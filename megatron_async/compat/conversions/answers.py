"""From a request of ours to Megatron's `DynamicInferenceRequest`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status

from megatron_async.compat.conversions.errors import to_overflow
from megatron_async.compat.conversions.events import TokenEvent, to_events
from megatron_async.compat.conversions.text import detokenize, tokens_before_stop_word
from megatron_async.requests.inference_request import DynamicInferenceRequest as OwnRequest


def describe(
    answer: DynamicInferenceRequest, own: OwnRequest, tokens: list[int], *, with_pauses: bool
) -> None:
    """Put into `answer` what is known of a request that goes on.

    Args:
        answer: Megatron's request.
        own: ours.
        tokens: generated so far.
        with_pauses: keep PAUSE events.
    """
    set_prompt(answer, own)
    answer.status = Status[own.status.name]
    answer.generated_tokens = tokens
    answer.generated_length = len(tokens)
    answer.ttft = own.ttft
    answer.num_cached_tokens = own.num_cached_tokens or 0
    answer.events = to_events(own.events, with_pauses=with_pauses)
    answer.event_add_engine = answer.events[0]


def set_prompt(answer: DynamicInferenceRequest, own: OwnRequest) -> None:
    """The prompt's tokens, int64 `[prompt length]`, host memory; once."""
    if answer.prompt_length != len(own.prompt_tokens):
        answer.prompt_tokens = torch.from_numpy(own.prompt_tokens.astype("int64"))
        answer.remaining_prompt_tokens = answer.prompt_tokens
        answer.prompt_length = len(own.prompt_tokens)


def complete(
    answer: DynamicInferenceRequest,
    own: OwnRequest,
    tokenizer: Any,
    token_events: list[TokenEvent],
    *,
    with_pauses: bool,
) -> None:
    """Put into `answer` all that is known of a request that has ended. Python runs for each token
    where alternatives or segments were asked for, once.

    Raises:
        Exception: what the tokenizer raises.
    """
    describe(answer, own, list(own.generated_tokens), with_pauses=with_pauses)
    error = to_overflow(own.request_id, own.error) if own.failed() else None
    answer.events = to_events(own.events, token_events, error, with_pauses=with_pauses)
    answer.latency = own.latency
    kept = len(own.generated_tokens)
    if tokenizer is not None:
        kept = _set_texts(answer, own, tokenizer)
    if own.ttft is not None and own.latency is not None and kept > 1:
        answer.tpot = [(own.latency - own.ttft) / (len(own.generated_tokens) - 1)]
    _set_log_probs(answer, own, kept)


def _set_texts(answer: DynamicInferenceRequest, own: OwnRequest, tokenizer: Any) -> int:
    """Texts as Megatron makes them; its generated tokens end before a stop word.

    Returns:
        how many generated tokens are kept.
    """
    tokens, params = own.generated_tokens, own.sampling_params
    keeps_stop = params.detokenize_stop_sequence
    if answer.prompt is None:
        answer.prompt = detokenize(tokenizer, own.prompt_tokens.tolist(), remove_EOD=False)
    if own.finish_reason == "stop_word":
        # Words are matched on text: one may begin inside of a token.
        answer.generated_text = own.generated_text
        if not keeps_stop:
            words = params.stop_words or []
            kept = tokens_before_stop_word(tokenizer, tokens, words, own.stop_words_from)
            answer.generated_tokens = tokens = tokens[:kept]
            answer.generated_length = kept
    else:
        answer.generated_text = detokenize(tokenizer, tokens, remove_EOD=not keeps_stop)
        if params.echo:
            answer.generated_text = answer.prompt + answer.generated_text
    if answer.sampling_params is not None and answer.sampling_params.return_segments:
        answer.generated_segments = [tokenizer.detokenize([token]) for token in tokens]
        prompt = own.prompt_tokens.tolist()
        answer.segments = [tokenizer.detokenize([token]) for token in prompt]
        answer.segments += answer.generated_segments
    return len(tokens)


def _set_log_probs(answer: DynamicInferenceRequest, own: OwnRequest, kept: int) -> None:
    """Lists as Megatron has them: empty ones for the prompt where it was left out."""
    if own.log_probs is None:
        return
    answer.generated_log_probs = (own.generated_log_probs or [])[:kept]
    answer.prompt_log_probs = own.prompt_log_probs or []
    if own.sampling_params.top_n_logprobs:
        answer.generated_top_n_logprobs = (own.generated_top_n_logprobs or [])[:kept]
        answer.prompt_top_n_logprobs = own.prompt_top_n_logprobs or []
