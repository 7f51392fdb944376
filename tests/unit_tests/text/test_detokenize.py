"""Text token by token is the text of all tokens, and a request's is the engine's."""

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from megatron_async import DynamicInferenceRequest, SamplingParams
from megatron_async.text.byte_level import _printable
from megatron_async.text.detokenize import (
    LONGEST_WINDOW,
    REPLACEMENT,
    ByteDetokenizer,
    IncrementalDetokenizer,
)
from megatron_async.text.token_text import TokenText
from megatron_async.text.token_watch import TokenWatch
from megatron_async.text.tokenizer import Tokenizer


def of_bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def texts(tokens, detokenize=of_bytes):
    """Text after each token."""
    detokenizer, text, found = IncrementalDetokenizer(detokenize), "", []
    for token in tokens:
        text += detokenizer.push(token)
        found.append(text)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes(seed):
    """Valid characters of one to four bytes, and bytes that are none."""
    draw = random.Random(seed)
    data = b""
    while len(data) < 200:
        bad = bytes([draw.choice((0x80, 0xC3, 0xE2, 0xF0, 0xFF))])
        data += bad if draw.random() < 0.2 else draw.choice("aé€🙂 ").encode()
    for count, text in enumerate(texts(data), 1):
        whole = of_bytes(data[:count])
        assert whole.startswith(text)
        missing = whole[len(text) :]
        assert set(missing) <= {REPLACEMENT}


def test_a_character_comes_whole():
    assert texts("a🙂b".encode()) == ["a", "a", "a", "a", "a🙂", "a🙂b"]


def byte_fallback():
    """A tokenizer of a few words that spells the rest in byte tokens, as Llama 2's does."""
    words = ["<unk>", "▁a", "▁word", "b"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Backend(BPE(ids, [], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer, len(words)


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_byte_tokens(seed):
    """Bytes of a run are decoded together: an unfinished character changes those before it."""
    tokenizer, first_byte = byte_fallback()
    draw = random.Random(seed)
    tokens, ends = [], []
    while len(tokens) < 150:
        if draw.random() < 0.2:
            tokens.append(draw.randrange(1, first_byte))
        else:
            tokens += [first_byte + byte for byte in draw.choice("é€🙂世").encode()]
        ends.append(len(tokens))
    found = texts(tokens, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    whole = tokenizer.decode(tokens)
    assert REPLACEMENT not in whole
    assert all(whole.startswith(text) for text in found)
    assert [found[end - 1] for end in ends] == [tokenizer.decode(tokens[:end]) for end in ends]


def test_bytes_that_are_no_character_come_in_the_end():
    found = texts(b"\x80" * (LONGEST_WINDOW + 20) + b"a")
    assert found[LONGEST_WINDOW - 2] == ""
    assert found[LONGEST_WINDOW - 1] == REPLACEMENT * LONGEST_WINDOW
    assert found[-1] == REPLACEMENT * (LONGEST_WINDOW + 20) + "a"


def test_a_decoder_that_drops_the_first_space():
    pieces = [" one", " two", "three", " "] * 12

    def detokenize(tokens):
        return "".join(pieces[token] for token in tokens).removeprefix(" ")

    tokens = list(range(len(pieces)))
    assert texts(tokens, detokenize) == [detokenize(tokens[: n + 1]) for n in tokens]


def test_the_window_stays_short():
    longest = 0

    def detokenize(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return of_bytes(tokens)

    assert texts(b"x" * 500, detokenize)[-1] == "x" * 500
    assert longest < 20


def in_chunks(detokenizer, tokens, draw, longest):
    """Text after each chunk, and how many tokens there were."""
    text, count, found = "", 0, []
    while count < len(tokens):
        chunk = tokens[count : count + draw.randrange(1, longest)]
        text, count = text + detokenizer.push_all(chunk), count + len(chunk)
        found.append((text, count))
    return found


@pytest.mark.parametrize("longest", [2, 6, 40, 150])
@pytest.mark.parametrize("seed", range(15))
def test_chunks_of_random_bytes(seed, longest):
    draw = random.Random(seed)
    data = b""
    while len(data) < 400:
        bad = bytes([draw.choice((0x80, 0xC3, 0xE2, 0xF0, 0xFF))])
        data += bad if draw.random() < 0.1 else draw.choice("aé€🙂 ").encode()
    pieces = {byte: bytes([byte]) for byte in range(256)}
    for detokenizer in (IncrementalDetokenizer(of_bytes), ByteDetokenizer(pieces)):
        for text, count in in_chunks(detokenizer, list(data), draw, longest):
            whole = of_bytes(data[:count])
            assert of_bytes(data).startswith(text)
            assert whole.startswith(text)
            assert set(whole[len(text) :]) <= {REPLACEMENT}


@pytest.mark.parametrize("seed", range(10))
def test_chunks_of_byte_tokens(seed):
    """With byte fallback, chunks end inside of characters too."""
    tokenizer, first_byte = byte_fallback()
    draw = random.Random(seed)
    tokens = []
    while len(tokens) < 150:
        if draw.random() < 0.2:
            tokens.append(draw.randrange(1, first_byte))
        else:
            tokens += [first_byte + byte for byte in draw.choice("é€🙂世").encode()]
    detokenizer = IncrementalDetokenizer(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    )
    found = in_chunks(detokenizer, tokens, draw, 9)
    whole = tokenizer.decode(tokens)
    assert all(whole.startswith(text) for text, _ in found)
    assert found[-1][0] == whole


def test_a_chunk_costs_what_is_new():
    """A long chunk is decoded once, not token by token."""
    decoded = 0

    def detokenize(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return of_bytes(tokens)

    detokenizer = IncrementalDetokenizer(detokenize)
    assert detokenizer.push_all(b"x" * 1000) == "x" * 1000
    assert decoded < 1000 + 30


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
def words_and_bytes() -> Tokenizer:
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
@pytest.mark.parametrize("make", [byte_level, words_and_bytes])
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
