"""Text token by token is the text of all tokens."""

import random

import pytest

from megatron_async.detokenize import MOST_UNFINISHED, REPLACEMENT, IncrementalDetokenizer


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
        assert len(missing) <= MOST_UNFINISHED
        assert set(missing) <= {REPLACEMENT}


def test_a_character_comes_whole():
    assert texts("a🙂b".encode()) == ["a", "a", "a", "a", "a🙂", "a🙂b"]


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
