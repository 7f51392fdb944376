"""Text to tokens and back as Megatron's controller does it, with any tokenizer of its interface."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from megatron_async.text.stop_words import cut_at_stop_word


def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:  # noqa: N803
    """Token ids of a prompt, with the beginning-of-sequence token or without.

    Megatron asks the caller, not the tokenizer: those that a tokenizer puts in front by itself are
    taken away, unless `add_BOS`, and then there is one.

    Raises:
        ValueError: no tokenizer, or `add_BOS` and it has no such token.
    """
    if tokenizer is None:
        raise ValueError(
            "a text prompt needs a tokenizer and this controller has none: give token ids, or a "
            "tokenizer to TextGenerationController."
        )
    bos = getattr(tokenizer, "bos", None)
    if add_BOS and bos is None:
        raise ValueError(
            "add_BOS=True, but the tokenizer has no beginning-of-sequence token: leave add_BOS "
            "False."
        )
    tokens = list(tokenizer.tokenize(prompt))
    start = 0
    while bos is not None and start < len(tokens) and tokens[start] == bos:
        start += 1
    return ([bos] if add_BOS else []) + tokens[start:]


def detokenize(
    tokenizer: Any,
    tokens: Sequence[int],
    remove_EOD: bool = True,  # noqa: N803
    skip_special_tokens: bool = True,
) -> str:
    """Text of token ids.

    Args:
        tokenizer: with `detokenize`.
        tokens: ids.
        remove_EOD: without the end-of-document tokens at their end.
        skip_special_tokens: told to tokenizers that take it.
    """
    ids, end = list(tokens), getattr(tokenizer, "eod", None)
    while remove_EOD and end is not None and ids and ids[-1] == end:
        ids.pop()
    parameters = inspect.signature(tokenizer.detokenize).parameters
    options = {}
    if "skip_special_tokens" in parameters:
        options["skip_special_tokens"] = skip_special_tokens
    text: str = tokenizer.detokenize(ids, **options)
    return text


def tokens_before_stop_word(
    tokenizer: Any, tokens: Sequence[int], words: Sequence[str], counts_from: int
) -> int:
    """How many of the tokens lie wholly before the stop word that ended a request.

    Args:
        tokenizer: with `detokenize`.
        tokens: generated, the last of which completes the word.
        words: stop words of the request.
        counts_from: `DynamicInferenceRequest.stop_words_from`.
    """
    text = tokenizer.detokenize(list(tokens))
    length = len(cut_at_stop_word(text, words, False, counts_from))
    kept = len(tokens) - 1
    while kept > 0 and len(tokenizer.detokenize(list(tokens[:kept]))) > length:
        kept -= 1
    return max(kept, 0)
