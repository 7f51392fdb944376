"""Stop words in text that arrives token by token."""

import itertools
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.checkpoints.registry import open_model
from megatron_async.text.stop_words import ByteMatcher, StopWordMatcher, cut_at_stop_word
from megatron_async.text.token_watch import EVERYTHING, MOST_SETS, NOTHING, TokenWatch, Vocabulary
from megatron_async.text.tokenizer import Tokenizer


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


PIECES = ["a", "b", "ab", "\n", "\n\n", " the", "é", "€", "🙂", "🇩🇪", "\ufffd", "<|im_end|>", " 1"]


@cache
def smollm2() -> tuple[Tokenizer, TokenWatch]:
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    return tokenizer, TokenWatch(tokenizer, tokenizer.vocab_size + 8)


def ended_at(words: list[str], tokens: list[int], min_tokens: int) -> tuple[int, int] | None:
    """Where a request ends that is looked at only where the table says so, and from where its
    stop words counted."""
    tokenizer, watch = smollm2()
    matcher, row = watch.stop_words(words, tokenizer.detokenize)
    generated = np.array(tokens, dtype=np.int32)
    rows = np.full(len(tokens), row, dtype=np.int32)
    for place in np.flatnonzero(watch.is_watched(rows, generated)):
        if matcher.end_with(generated[: place + 1], min_tokens):
            return int(place), matcher.counts_from
    return None


def ended_at_with_all(
    words: list[str], tokens: list[int], min_tokens: int
) -> tuple[int, int] | None:
    """Stop words that are looked for at every token."""
    matcher = StopWordMatcher(words, smollm2()[0].detokenize)
    for place, token in enumerate(tokens):
        if matcher.push(token, place + 1 >= min_tokens):
            return place, matcher.counts_from
    return None


TEXTS = st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | st.text(max_size=30)


@st.composite
def tokens_and_words(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Text as the tokenizer splits it, pieces that it would merge, single bytes; words are often
    parts of it."""
    tokenizer, _ = smollm2()
    parts = draw(st.lists(TEXTS, min_size=1, max_size=6))
    tokens = [t for part in parts for t in tokenizer.tokenize(part, add_special_tokens=False)]
    strays = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 300)), max_size=6))
    for place, token in strays:  # the first 300 ids are specials and the single bytes
        tokens.insert(place, token)
    text = tokenizer.detokenize(tokens)
    words = []
    for start, length in draw(
        st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 6)), min_size=1, max_size=3)
    ):
        words.append(text[start : start + length] or draw(st.text(min_size=1, max_size=4)))
    return tokens, words


@settings(max_examples=80, deadline=None)
@given(case=tokens_and_words(), min_tokens=st.integers(0, 6))
def test_ends_at_the_same_token(case: tuple[list[int], list[str]], min_tokens: int) -> None:
    tokens, words = case
    assert ended_at(words, tokens, min_tokens) == ended_at_with_all(words, tokens, min_tokens)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4).map(str.encode), max_size=8),
    word=st.text("ab", min_size=1, max_size=9).map(str.encode),
)
def test_tokens_that_complete_a_word_of_any_length(pieces: list[bytes], word: bytes) -> None:
    """Words may be longer than all tokens. Break `completing`: end its loop one byte earlier."""
    ends = [word[-length:] for length in range(1, len(word))]
    expected = {
        token
        for token, piece in enumerate(pieces)
        if word in piece or any(piece.startswith(end) for end in ends)
    }
    assert set(Vocabulary(pieces).completing(word).tolist()) == expected


def test_bytes_of_all_tokens() -> None:
    """Each token's bytes are what it adds to a text."""
    tokenizer, _ = smollm2()
    pieces = tokenizer.token_bytes(tokenizer.vocab_size + 8)
    assert pieces is not None
    for token, piece in enumerate(pieces):
        assert tokenizer.detokenize([token]) == piece.decode(errors="replace")
    assert pieces[1] == b"" != tokenizer.detokenize([1], skip_special_tokens=False).encode()
    some = np.random.default_rng(0).integers(tokenizer.vocab_size, size=3000).tolist()
    some[:300] = [n % 300 for n in range(0, 2100, 7)]  # specials, and bytes that are no character
    text = b"".join(pieces[token] for token in some).decode(errors="replace")
    assert tokenizer.detokenize(some) == text
    assert tokenizer.byte_pieces is not None
    assert [tokenizer.byte_pieces[token] for token in range(len(pieces))] == pieces


def test_few_tokens_are_watched() -> None:
    tokenizer, watch = smollm2()
    tokens = np.arange(tokenizer.vocab_size, dtype=np.int32)
    for words in (["\n\n"], ["User:"], ["\n\nHuman:", "</s>"]):
        matcher, row = watch.stop_words(words, tokenizer.detokenize)
        assert isinstance(matcher, ByteMatcher)
        watched = watch.is_watched(np.full(len(tokens), row, np.int32), tokens)
        assert 0 < watched.sum() < len(tokens) / 200
        for token in np.flatnonzero(watched):
            text = tokenizer.detokenize([int(token)])
            assert any(
                word in text or any(text.startswith(word[n:]) for n in range(len(word)))
                for word in words
            )


def test_words_that_bytes_do_not_find() -> None:
    tokenizer, watch = smollm2()
    for word in ("\ufffd", "a\ufffd", "\ud800"):
        matcher, row = watch.stop_words(["ok", word], tokenizer.detokenize)
        assert isinstance(matcher, StopWordMatcher)
        assert row == EVERYTHING


def test_tokenizers_that_do_not_tell_bytes_are_asked_at_every_token() -> None:
    class Loud(Tokenizer):
        def detokenize(self, ids, skip_special_tokens=True):  # type: ignore[no-untyped-def]
            return super().detokenize(ids, skip_special_tokens).upper()

    plain, _ = smollm2()
    loud = Loud(plain.backend, plain.config, plain.eos_ids, None, "loud")
    matcher, row = TokenWatch(loud, plain.vocab_size).stop_words(["END"], loud.detokenize)
    assert isinstance(matcher, StopWordMatcher)
    assert row == EVERYTHING


def test_rows_are_used_again_when_their_requests_are_gone() -> None:
    tokenizer, _ = smollm2()
    watch = TokenWatch(tokenizer, tokenizer.vocab_size)
    kept = [
        watch.stop_words([f"word {number}"], tokenizer.detokenize) for number in range(MOST_SETS)
    ]
    rows = {row for _, row in kept}
    assert len(rows) == MOST_SETS
    assert not rows & {NOTHING, EVERYTHING}
    assert watch.stop_words(["word 3"], tokenizer.detokenize)[1] == kept[3][1]
    assert watch.stop_words(["another"], tokenizer.detokenize)[1] == EVERYTHING
    row = kept.pop(5)[1]
    assert watch.stop_words(["zq"], tokenizer.detokenize)[1] == row
    token = np.array([tokenizer.tokenize("zq")[-1], tokenizer.tokenize(" 5")[-1]], np.int32)
    assert watch.is_watched(np.full(2, row, np.int32), token).tolist() == [True, False]
