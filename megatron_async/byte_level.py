"""Bytes of byte-level BPE tokens: the text of some tokens is their bytes one behind the other.

In the vocabulary each byte is written as a printable character, after GPT-2's table.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer as BackendTokenizer


def byte_level_pieces(backend: BackendTokenizer, num_tokens: int) -> list[bytes] | None:
    """What each token adds to a text that is decoded without special tokens.

    Args:
        backend: the tokenizer proper.
        num_tokens: how many to tell; ids that the tokenizer does not have add nothing.

    Returns:
        bytes by token id; None where its decoder is not byte-level alone, and texts of tokens may
        not simply add up.
    """
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    if decoder.get("type") != "ByteLevel":
        return None
    byte_of = {character: byte for byte, character in enumerate(_printable())}
    pieces = [b""] * num_tokens
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token < num_tokens and text not in special:
            try:
                pieces[token] = bytes(map(byte_of.__getitem__, text))
            except KeyError:  # an added token is written as it is
                pieces[token] = text.encode()
    return pieces


def _printable() -> list[str]:
    """The character that stands for each byte."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = (byte for byte in range(256) if byte not in set(own))
    shifted = {byte: 256 + number for number, byte in enumerate(others)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]
