"""Make a request ready to be queued: checked, tokenized, and with all that its steps will need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_async.engines.validation import (
    check_params_type,
    check_priority,
    check_request,
    prompt_to_array,
    require_detokenizer,
)
from megatron_async.errors import RequestError
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
)
from megatron_async.requests.log_probs import RequestLogProbs
from megatron_async.requests.request_registry import RequestEntry
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.sampling_record import sampling_record
from megatron_async.text.grammar_compiler import GrammarCompiler
from megatron_async.text.panics import INTERRUPTS
from megatron_async.text.structured_output import StructuredOutput
from megatron_async.text.token_watch import EVERYTHING, TokenWatch
from megatron_async.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


def new_request(
    request_id: int, prompt: Any, given_params: Any, tokenizer: Any, traceparent: str = ""
) -> DynamicInferenceRequest:
    """A request of which nothing is checked yet but its id and its trace. Parameters that are given
    are the caller's until `prepare_request` copies them."""
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        sampling_params=(
            given_params if isinstance(given_params, SamplingParams) else SamplingParams()
        ),
        # The tokenizer's method, not the controller's: a request that led back to the engine would
        # keep the engine's memory until Python looks for cycles.
        detokenizer=None if tokenizer is None else tokenizer.detokenize,
        traceparent=traceparent,
    )
    request.add_event(DynamicInferenceEventType.ADD_ENGINE)
    return request


@contextmanager
def _panics_as_request_errors() -> Iterator[None]:
    """Libraries written in Rust panic: their error is no `Exception`."""
    try:
        yield
    except (Exception, *INTERRUPTS):
        raise
    except BaseException as panic:
        raise RequestError(
            f"the request could not be prepared: {type(panic).__name__}: {panic}. Change its "
            "prompt or sampling_params."
        ) from panic


@_panics_as_request_errors()
def prepare_request(
    entry: RequestEntry,
    prompt: Any,
    given_params: Any,
    priority: Any,
    controller: TextGenerationController,
    grammars: GrammarCompiler,
    watch: TokenWatch,
) -> int:
    """Check what the caller gave, and fill in the entry and its request.

    Args:
        entry: of a new request.
        prompt: text or token ids.
        given_params: the sampling parameters as they were given.
        priority: as it was given.
        controller: for its tokenizer and vocabulary, and for the limits of its context.
        grammars: for its tokenizer.
        watch: likewise.

    Returns:
        the sequence length, tokens, at which the request ends.

    Raises:
        RequestError: the request can never be served, or a library written in Rust panicked; other
            exceptions come from a user's own tokenizer.
    """
    request, tokenizer = entry.request, controller.tokenizer
    check_params_type(given_params)
    if given_params is not None:
        request.sampling_params = given_params.copy()
    params, vocab_size = request.sampling_params, controller.vocab_size
    request.priority = check_priority(priority)
    if isinstance(prompt, str):
        prompt = controller.tokenize_prompt(prompt, params.add_BOS)
    request.prompt_tokens = prompt_to_array(prompt, vocab_size)
    if params.termination_id is None:
        params.termination_id = getattr(tokenizer, "eod", None)
    limits = check_request(request, controller.context, vocab_size)
    length = len(request.prompt_tokens)
    request.record = sampling_record(
        params,
        seed=limits.seed,
        prompt_length=length,
        max_length=limits.max_length,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        drafts=limits.drafts,
    )
    if params.return_log_probs:
        wanted = 0 if params.skip_prompt_log_probs else length
        request.log_probs = RequestLogProbs(min(params.top_n_logprobs, vocab_size), wanted)
    if params.stop_words:
        entry.stop_words, request.watch_row = watch.stop_words(
            params.stop_words, require_detokenizer(tokenizer)
        )
    if params.structured_output is not None:
        if isinstance(params.structured_output, StructuredOutput):
            params.structured_output = params.structured_output.fixed()
        entry.grammar_job = grammars.begin(params.structured_output)
        request.watch_row = EVERYTHING
    return limits.max_length
