"""`Pieces`: a tokenizer for `AttentionModel`'s vocabulary, with grammars and stop words."""

from __future__ import annotations

import itertools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.attention_model import VOCABULARY


class Pieces:
    """A tokenizer whose tokens are one or two of the letters a to d, so that stop words come often,
    and across tokens."""

    eod = -1
    eos_ids = (VOCABULARY - 1,)

    def __init__(self) -> None:
        self.backend = _backend()

    def tokenize(self, text: str) -> list[int]:
        return ["abcd".index(letter) for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(PIECES[token] for token in tokens)


PIECES = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("abcd", repeat=n)]
PIECES = PIECES[:VOCABULARY]


def _backend() -> Tokenizer:
    """The same tokens for grammars; the last one ends a text there."""
    vocabulary = {piece: token for token, piece in enumerate(PIECES[:-1])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend
