"""Make a request ready to be queued: checked, tokenized, and with all that its steps will need."""

from __future__ import annotations

from typing import Any

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.engines.request_registry import RequestEntry
from megatron_async.engines.validation import (
    RequestLimits,
    check_params_type,
    check_priority,
    check_request,
    prompt_to_array,
    require_detokenizer,
)
from megatron_async.grammar_compiler import GrammarCompiler
from megatron_async.log_probs import RequestLogProbs
from megatron_async.sampling_features import features_and_record
from megatron_async.structured_output import StructuredOutput
from megatron_async.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_async.token_watch import EVERYTHING, TokenWatch


def prepare_request(
    entry: RequestEntry,
    prompt: Any,
    given_params: Any,
    priority: Any,
    controller: TextGenerationController,
    context: DynamicInferenceContext,
    grammars: GrammarCompiler,
    watch: TokenWatch,
) -> RequestLimits:
    """Check what the caller gave, and fill in the entry and its request.

    Args:
        entry: its request has a copy of the sampling parameters.
        prompt: text or token ids.
        given_params: the sampling parameters as they were given.
        priority: as it was given.
        controller: for its tokenizer and vocabulary.
        context: for its limits.
        grammars: for its tokenizer.
        watch: likewise.

    Raises:
        RequestError: the request can never be served; other exceptions come from a user's own
            tokenizer.
    """
    request, tokenizer = entry.request, controller.tokenizer
    params, vocab_size = request.sampling_params, controller.vocab_size
    check_params_type(given_params)
    request.priority = check_priority(priority)
    if isinstance(prompt, str):
        prompt = controller.tokenize_prompt(prompt, params.add_BOS)
    request.prompt_tokens = prompt_to_array(prompt, vocab_size)
    if params.termination_id is None:
        params.termination_id = getattr(tokenizer, "eod", None)
    limits = check_request(request, context, vocab_size)
    length = len(request.prompt_tokens)
    features, request.record = features_and_record(params, length, vocab_size, tokenizer)
    request.row_features = int(features)
    if params.return_log_probs:
        wanted = 0 if params.skip_prompt_log_probs else length
        request.log_probs = RequestLogProbs(min(params.top_n_logprobs, vocab_size), wanted)
    if params.stop_words:
        entry.stop_words, request.watch_row = watch.stop_words(
            params.stop_words, require_detokenizer(tokenizer)
        )
    if params.structured_output is not None:
        wanted = params.structured_output
        if isinstance(wanted, StructuredOutput):
            wanted = params.structured_output = wanted.fixed()
        entry.grammar_job = grammars.begin(wanted)
        request.watch_row = EVERYTHING
    return limits
