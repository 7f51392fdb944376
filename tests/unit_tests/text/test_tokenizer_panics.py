"""Tokenizers with hostile expressions: what they raise is an error of one request."""

from __future__ import annotations

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from megatron_async.errors import RequestError
from megatron_async.text.tokenizer import Tokenizer

CATASTROPHIC = Regex(r"(a+)+$")


def hostile() -> Tokenizer:
    backend = BackendTokenizer(models.WordLevel({"a" * 40 + "b": 0, "c": 1}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Split(CATASTROPHIC, "isolated")
    backend.decoder = decoders.Replace(CATASTROPHIC, "")
    return Tokenizer(backend, {}, [], None, "hostile")


def test_an_expression_that_gives_up_is_an_error_of_its_text() -> None:
    """The library's limit of tries ends the expression in a panic, which is no `Exception`."""
    tokenizer = hostile()
    with pytest.raises(RequestError, match="tokenized: PanicException"):
        tokenizer.tokenize("a" * 40 + "b")
    with pytest.raises(RequestError, match="made a text: PanicException"):
        tokenizer.detokenize([0])
    assert tokenizer.detokenize(tokenizer.tokenize("c")) == "c"


def test_a_bare_exception_of_the_library_is_one_too() -> None:
    backend = BackendTokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    with pytest.raises(RequestError, match="tokenized: Exception"):
        Tokenizer(backend, {}, [], None, "no unknown token").tokenize("b")
