"""From a request's sampling parameters to the features and the record that its rows carry."""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import RequestError
from megatron_async.ops.slot_records import (
    FOREVER,
    MAX_BAD_WORDS,
    MAX_EDITS,
    WINDOW,
    Edit,
    RowFeature,
    pack_record,
)
from megatron_async.sampling_params import SamplingParams, check_word_length


def features_and_record(
    params: SamplingParams, prompt_length: int, vocab_size: int, tokenizer: Any
) -> tuple[RowFeature, NDArray[np.int32] | None]:
    """What the sampling step must do for a request beyond temperature and filters.

    Args:
        params: validated; its termination id resolved.
        prompt_length: tokens.
        vocab_size: token ids run from 0 to vocab_size - 1.
        tokenizer: of the engine, or None; for bad words that are texts.

    Returns:
        the features, and the record, None where there are no features.

    Raises:
        RequestError: more than a record holds, a bad word that is none, or nothing left to sample.
    """
    features = RowFeature(0)
    penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
    if penalties != (0, 0, 1):
        features |= RowFeature.PENALTIES
    if params.return_log_probs:
        features |= RowFeature.LOG_PROBS
        if params.logprobs_mode == "processed":
            features |= RowFeature.PROCESSED_LOG_PROBS
    edits = _edits(params, prompt_length)
    if edits:
        features |= RowFeature.EDITS
    if params.structured_output is not None:
        features |= RowFeature.CONSTRAINED
    bad_words = _bad_words(params, vocab_size, tokenizer)
    if bad_words:
        features |= RowFeature.BAD_WORDS
    if not features:
        return features, None
    banned = {token for token, value, _ in edits if value == -math.inf}
    banned |= {word[0] for word in bad_words if len(word) == 1}
    if len(banned) >= vocab_size:
        raise RequestError(
            f"bad_words and min_tokens ban all {vocab_size} tokens of the vocabulary: leave one."
        )
    top_n = min(params.top_n_logprobs, vocab_size)
    record = pack_record(penalties, top_n, prompt_length, edits, bad_words)
    return features, record


def _edits(params: SamplingParams, prompt_length: int) -> list[Edit]:
    edits: list[Edit] = [
        (token, float(bias), FOREVER) for token, bias in (params.logit_bias or {}).items() if bias
    ]
    if params.min_tokens:
        ends = {params.termination_id, *(params.stop_token_ids or ())} - {None, -1}
        edits += [(token, -math.inf, prompt_length + params.min_tokens) for token in sorted(ends)]
    if len(edits) > MAX_EDITS:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias or ())} tokens, and with the stop tokens that "
            f"min_tokens bans there are {len(edits)}: at most {MAX_EDITS} are served."
        )
    return edits


def _bad_words(params: SamplingParams, vocab_size: int, tokenizer: Any) -> list[list[int]]:
    given = params.bad_words
    if given is None:
        return []
    if not isinstance(given, list):
        raise RequestError(f"bad_words={given!r} is not allowed: it must be a list of words.")
    if len(given) > MAX_BAD_WORDS:  # before each is tokenized
        raise RequestError(
            f"bad_words has {len(given)} words: at most {MAX_BAD_WORDS} are served."
        )
    words: list[list[int]] = []
    for word in given:
        for tokens in _spellings(word, vocab_size, tokenizer):
            _check_window(word, tokens)
            if tokens not in words:
                words.append(tokens)
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} words (a text counts again with a space before it): at "
            f"most {MAX_BAD_WORDS} are served."
        )
    return words


def _check_window(word: Any, tokens: list[int]) -> None:
    if len(tokens) > WINDOW:
        raise RequestError(
            f"the bad word {reprlib.repr(word)} has {len(tokens)} tokens: at most {WINDOW} are "
            "served."
        )


def _spellings(word: Any, vocab_size: int, tokenizer: Any) -> list[list[int]]:
    """The token sequences that a bad word stands for."""
    if isinstance(word, str):
        if not word.strip():
            raise RequestError(f"the bad word {word!r} is empty: give text or token ids.")
        if tokenizer is None:
            raise RequestError(
                f"the bad word {word!r} is a text, but this engine has no tokenizer: give its "
                "token ids, or give the engine a tokenizer."
            )
        check_word_length("bad_words", word)
        text = word.lstrip()
        return [list(tokenizer.tokenize(text)), list(tokenizer.tokenize(" " + text))]
    if isinstance(word, list):
        _check_window(word, word)
    if not isinstance(word, list) or not word or not all(_is_token(t, vocab_size) for t in word):
        raise RequestError(
            f"the bad word {word!r} is not allowed: it must be a text, or a list of token ids from "
            f"0 to {vocab_size - 1}."
        )
    return [word]


def _is_token(token: Any, vocab_size: int) -> bool:
    is_integer = isinstance(token, numbers.Integral) and not isinstance(token, bool)
    return is_integer and 0 <= token < vocab_size
