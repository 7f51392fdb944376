"""Bytes of byte-level BPE tokens: the text of some tokens is their bytes one after the other.

In the vocabulary each byte is written as a printable character, after GPT-2's table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from tokenizers import Tokenizer as BackendTokenizer


def is_byte_level(backend: BackendTokenizer) -> bool:
    """Whether its decoder is byte-level alone."""
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


class ByteRuns(NamedTuple):
    """Tokens of single bytes, of which a tokenizer with byte fallback (Llama 2, Mixtral) decodes a
    run as a whole: a byte that is no character changes the text of all bytes of its run. So the
    text of a run is certain when another token has ended the run.

    Attributes:
        bytes: ids of these tokens.
        hidden: ids of tokens that texts leave out, which end no run.
        size: ids from here on are none, and end no run either.
    """

    bytes: frozenset[int]
    hidden: frozenset[int]
    size: int

    def open_from(self, tokens: Sequence[int]) -> int:
        """Where the run begins that the tokens end in; their number if they end in none."""
        start = len(tokens)
        for place in range(len(tokens) - 1, -1, -1):
            token = tokens[place]
            if token in self.bytes:
                start = place
            elif token not in self.hidden and token < self.size:
                break
        return start


def byte_runs(backend: BackendTokenizer) -> ByteRuns | None:
    """The tokens of single bytes; None where the decoder has no byte fallback."""
    if backend.decoder is None or b'"ByteFallback"' not in backend.decoder.__getstate__():
        return None
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    found = frozenset(token for token in ids if token is not None)
    hidden = frozenset(hidden_tokens(backend))
    return ByteRuns(found, hidden, backend.get_vocab_size(with_added_tokens=True))


class BytePieces(dict[int, bytes]):
    """Bytes of each token, by token id, of a backend that `is_byte_level`. A token is read when it
    is first asked for: reading a large vocabulary takes a second."""

    def __init__(self, backend: BackendTokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = set(hidden_tokens(backend).values())

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._read(self._backend.id_to_token(token))
        return piece

    def _read(self, text: str | None) -> bytes:
        if text is None or text in self._hidden:
            return b""
        byte_of = _bytes_of_characters()
        try:
            return bytes(map(byte_of.__getitem__, text))
        except KeyError:  # an added token is written as it is
            return text.encode()


def hidden_tokens(backend: BackendTokenizer) -> dict[int, str]:
    """Added tokens that texts leave out. The flag `special` of a token that was added twice may be
    another than what its texts show."""
    added = backend.get_added_tokens_decoder().items()
    return {
        number: token.content
        for number, token in added
        if not backend.decode([number], skip_special_tokens=True)
    }


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_printable())}


def _printable() -> list[str]:
    """The character that stands for each byte."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = (byte for byte in range(256) if byte not in set(own))
    shifted = {byte: 256 + number for number, byte in enumerate(others)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]
