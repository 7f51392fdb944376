"""Text token by token is the text of all tokens."""

import random

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from megatron_async.text.detokenize import (
    LONGEST_WINDOW,
    REPLACEMENT,
    ByteDetokenizer,
    IncrementalDetokenizer,
)


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
    tokenizer = Tokenizer(BPE(ids, [], unk_token="<unk>"))
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
