"""Stop words in text that arrives token by token."""

import itertools
import random

import pytest

from megatron_async.text.stop_words import StopWordMatcher, cut_at_stop_word


def of_bytes(tokens):
    """The plainest tokenizer: a token is a byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


class Pieces:
    """A tokenizer of strings; the first one decoded loses its leading space, as SentencePiece's
    do."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def __call__(self, tokens):
        return "".join(self.pieces[token] for token in tokens).removeprefix(" ")


def pushes(words, tokens, detokenize):
    matcher = StopWordMatcher(words, detokenize)
    return [matcher.push(token) for token in tokens]


def test_a_word_across_tokens_is_found_at_its_last_token():
    tokenizer = Pieces("the e", "nd of", " it")
    assert pushes(["end"], [0, 1, 2], tokenizer) == [False, True, False]


def test_a_word_inside_one_token_and_one_that_is_a_space():
    tokenizer = Pieces("abcd", " e", "f")
    assert pushes(["bc"], [0], tokenizer) == [True]
    assert pushes([" "], [0, 1], tokenizer) == [False, True]
    assert pushes(["x", "ef"], [0, 1, 2], tokenizer) == [False, False, True]


def test_characters_of_several_tokens():
    text = "naïve 🙂 fin"
    tokens = list(text.encode())
    for word in ("ï", "🙂", "e 🙂 f", "n"):
        found = pushes([word], tokens, of_bytes).index(True)
        assert of_bytes(tokens[: found + 1]).endswith(word)


def test_bytes_that_are_no_character_do_not_stop_the_search():
    tokens = [0xFF, 0xFE, 0xC3, 0x28, *b"stop", *b"more"]
    assert pushes(["stop"], tokens, of_bytes).index(True) == 7
    assert True not in pushes(["halt"], tokens, of_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_found_when_the_whole_text_first_contains_a_word(seed):
    draw = random.Random(seed)
    text = "".join(draw.choice("abcé🙂 ") for _ in range(200))
    words = ["".join(draw.choice("abcé🙂 ") for _ in range(draw.randint(1, 5))) for _ in range(3)]
    tokens = list(text.encode())
    whole = (any(w in of_bytes(tokens[: n + 1]) for w in words) for n in range(len(tokens)))
    expected = next(itertools.compress(itertools.count(), whole), None)
    found = pushes(words, tokens, of_bytes)
    assert (found.index(True) if True in found else None) == expected


@pytest.mark.parametrize(
    ("words", "keep", "expected"),
    [
        (["end"], False, "to the "),
        (["end"], True, "to the end"),
        (["nd of", "end o"], False, "to the "),
        (["the end", "end"], True, "to the end"),
        (["nowhere"], False, "to the end of it"),
    ],
)
def test_cut(words, keep, expected):
    assert cut_at_stop_word("to the end of it", words, keep) == expected
