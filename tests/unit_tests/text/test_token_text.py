"""However its tokens are divided, a request's text is the one that the engine gives it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.text.byte_level import _printable
from megatron_async.text.detokenize import ByteDetokenizer, IncrementalDetokenizer
from megatron_async.text.token_text import TokenText
from megatron_async.text.token_watch import TokenWatch
from megatron_async.text.tokenizer import Tokenizer

TEXTS = ("a", "b", "ab", " a", "abb", "é", "世", "🙂", "aé", "<x>")
EOD = "<end>"


@cache
def byte_level() -> Tokenizer:
    """Single bytes, some longer tokens, and a special one that ends texts."""
    printable = _printable()
    names = list(printable)
    for text in TEXTS:
        name = "".join(printable[byte] for byte in text.encode())
        if name not in names:
            names.append(name)
    backend = Backend(BPE({name: number for number, name in enumerate(names)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(EOD, special=True)])
    return Tokenizer(backend, {}, [len(names)], None, "a test")


@cache
def byte_fallback() -> Tokenizer:
    """Words, and byte tokens for all else, as Llama 2's: no table of bytes."""
    names = ["<unk>", "▁a", "▁word", "b", "ab", *(f"<0x{byte:02X}>" for byte in range(256)), EOD]
    ids = {name: number for number, name in enumerate(names)}
    backend = Backend(BPE(ids, [], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, {}, [ids[EOD]], None, "a test")


def likely(tokenizer: Tokenizer) -> list[int]:
    """Tokens of which stop words and characters are made often."""
    vocabulary = range(tokenizer.vocab_size)
    return [t for t in vocabulary if len(tokenizer.detokenize([t])) == 1 or t > 256][-60:]


def ended(
    tokens: list[int], params: SamplingParams, tokenizer: Tokenizer, cause: str
) -> DynamicInferenceRequest:
    """A request that the engine's own rules end."""
    request = DynamicInferenceRequest(
        request_id=0, prompt="é?", sampling_params=params, detokenizer=tokenizer.detokenize
    )
    words = None
    if params.stop_words:
        watch = TokenWatch(tokenizer, tokenizer.vocab_size)
        words = watch.stop_words(params.stop_words, tokenizer.detokenize)[0]
    stops = {tokenizer.eod, *(params.stop_token_ids or ())}
    request.finish_reason = cause
    for token in tokens:
        if token in stops and len(request.generated_tokens) + 1 < params.min_tokens:
            continue  # banned
        request.generated_tokens.append(token)
        if token in stops:
            is_eod = token == tokenizer.eod
            request.finish_reason = "termination_id" if is_eod else "stop_token"
            break
        known = np.array(request.generated_tokens, np.int32)
        if words is not None and words.end_with(known, params.min_tokens):
            request.stop_words_from = words.counts_from
            request.finish_reason = "stop_word"
            break
    return request


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_any_division_gives_the_engines_text(make, data) -> None:
    """Push a last token without holding it back, or look for no stop word before the end is told,
    and this fails."""
    tokenizer = make()
    ids = st.one_of(st.sampled_from(likely(tokenizer)), st.integers(0, tokenizer.vocab_size - 1))
    # With byte fallback a byte that is no character changes the text of the whole run before it.
    tokens = data.draw(st.lists(ids, max_size=24))
    text = tokenizer.detokenize(tokens)
    places = st.integers(0, max(len(text) - 1, 0))
    words = [
        text[first : first + length]
        for first, length in data.draw(st.lists(st.tuples(places, st.integers(1, 4)), max_size=3))
    ]
    params = SamplingParams(
        stop_words=[word for word in words if word] or None,
        stop_token_ids=data.draw(st.one_of(st.none(), st.lists(ids, min_size=1, max_size=2))),
        min_tokens=data.draw(st.sampled_from([0, 0, 1, 5])),
        detokenize_stop_sequence=data.draw(st.booleans()),
        echo=data.draw(st.booleans()),
    )
    request = ended(tokens, params, tokenizer, data.draw(st.sampled_from(["length", "aborted"])))
    pieces = TokenText(tokenizer, params, "é?")
    kind = ByteDetokenizer if make is byte_level else IncrementalDetokenizer
    plain = not any("\ufffd" in word for word in params.stop_words or ())
    assert isinstance(pieces._decoder, kind) or not plain
    found, left = "", list(request.generated_tokens)
    while left:
        count = data.draw(st.integers(1, len(left)))
        found += pieces.push(left[:count])
        left = left[count:]
    found += pieces.end(request.finish_reason, request.stop_words_from)
    assert found == request.generated_text


def test_a_token_is_text_at_once() -> None:
    tokenizer = byte_level()
    text = TokenText(tokenizer, SamplingParams())
    for word in ("ab", "世", "<x>"):
        (token,) = [t for t in range(tokenizer.vocab_size) if tokenizer.detokenize([t]) == word]
        assert text.push(np.array([token], np.int32)) == word
    assert text.push([tokenizer.eod]) == ""
    assert text.end("termination_id") == ""
