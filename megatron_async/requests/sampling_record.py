"""From a request's sampling parameters to its record: the one translator between the two."""

from __future__ import annotations

import math
import numbers
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import RequestError
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import (
    FILTERS,
    FOREVER,
    MAX_BAD_WORDS,
    MAX_EDITS,
    WINDOW,
    Edit,
    Header,
    RowFeature,
    pack_record,
)
from megatron_async.requests.sampling_params import SamplingParams, check_word_length

LEAST_TEMPERATURE = 1e-6
"""Smaller ones are taken as 0: logits divided by them could overflow, and greedy is their limit."""
HOTTEST = float(np.finfo(np.float32).max)
"""Makes all tokens equally likely, as any larger temperature does."""
MOST = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, eq=False)
class SamplingRecord:
    """The sampling parameters of a request for the device, made once.

    Attributes:
        words: int32 `[words]`, for the device; see `ops/sampling/slot_records.py`.
        features: the bits that its rows carry.
        mode: the lowest `SamplingMode` of a step with one of its rows.
    """

    words: NDArray[np.int32]
    features: RowFeature
    mode: SamplingMode


def sampling_record(
    params: SamplingParams,
    *,
    seed: int,
    prompt_length: int,
    max_length: int,
    vocab_size: int,
    tokenizer: Any = None,
    drafts: int = 0,
) -> SamplingRecord:
    """The record of a request.

    Args:
        params: validated; its termination id resolved.
        seed: of the request's random numbers, 0 .. 2**63 - 1.
        prompt_length: tokens.
        max_length: sequence length, tokens, at which the request ends.
        vocab_size: token ids run from 0 to vocab_size - 1.
        tokenizer: of the engine, or None; for bad words that are texts.
        drafts: most that a step verifies.

    Raises:
        RequestError: more values than a record holds, an invalid bad word, or all tokens banned.
    """
    edits = _edits(params, prompt_length)
    bad_words = _bad_words(params, vocab_size, tokenizer)
    banned = {token for token, value, _ in edits if value == -math.inf}
    banned |= {word[0] for word in bad_words if len(word) == 1}
    if len(banned) >= vocab_size:
        raise RequestError(
            f"bad_words and min_tokens ban all {vocab_size} tokens of the vocabulary: leave one."
        )
    features = _features(params, has_edits=bool(edits), has_bad_words=bool(bad_words))
    seed_low, seed_high = np.array([seed], dtype="<i8").view("<i4")
    is_greedy = params.is_greedy or params.temperature < LEAST_TEMPERATURE
    filters = _filters(params)
    words = pack_record(
        {
            Header.FEATURES: features,
            Header.TEMPERATURE: 0 if is_greedy else min(params.temperature, HOTTEST),
            **filters,
            Header.SEED_LOW: seed_low,
            Header.SEED_HIGH: seed_high,
            Header.MAX_LENGTH: max_length,
            Header.FREQUENCY: params.frequency_penalty,
            Header.PRESENCE: params.presence_penalty,
            Header.REPETITION: params.repetition_penalty,
            Header.TOP_N: min(params.top_n_logprobs, vocab_size),
            Header.PROMPT_LENGTH: prompt_length,
            Header.DRAFTS: drafts,
        },
        edits,
        bad_words,
    )
    return SamplingRecord(words, features, _mode(features, is_greedy, any(filters.values())))


def _features(params: SamplingParams, *, has_edits: bool, has_bad_words: bool) -> RowFeature:
    features = RowFeature(0)
    penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
    if penalties != (0, 0, 1):
        features |= RowFeature.PENALTIES
    if params.return_log_probs:
        features |= RowFeature.LOG_PROBS
        if params.logprobs_mode == "processed":
            features |= RowFeature.PROCESSED_LOG_PROBS
    if has_edits:
        features |= RowFeature.EDITS
    if params.structured_output is not None:
        features |= RowFeature.CONSTRAINED
    if has_bad_words:
        features |= RowFeature.BAD_WORDS
    return features


def _mode(features: RowFeature, is_greedy: bool, is_filtered: bool) -> SamplingMode:
    if features:
        return SamplingMode.PROCESSED
    if is_greedy:
        return SamplingMode.GREEDY
    return SamplingMode.FILTERED if is_filtered else SamplingMode.SOFTMAX


def _filters(params: SamplingParams) -> dict[Header, float]:
    found = {word: getattr(params, name) for word, name in FILTERS.items()}
    # More candidates than any vocabulary has are no limit, and a top_p of 1 keeps all tokens.
    found[Header.TOP_K] = min(found[Header.TOP_K], MOST)
    found[Header.TOP_P] = found[Header.TOP_P] if found[Header.TOP_P] < 1 else 0.0
    return found


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
        raise RequestError(f"bad_words has {len(given)} words: at most {MAX_BAD_WORDS} are served.")
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
