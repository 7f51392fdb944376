"""`TokenNames`: what single tokens are called in log probs, and their bytes.

A token may be a part of a character. OpenAI then gives its bytes, and a name that spells them, so
that tokens of different bytes have different names; a replacement character would be one name for
all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from megatron_async.text.byte_level import BytePieces, hidden_tokens
from megatron_async.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenNames:
    """Texts and bytes of single tokens, special ones included; each is made once. Without a
    tokenizer tokens are called by their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._special = {} if tokenizer is None else special_pieces(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._read(token)
        return found

    def text_of(self, token: int) -> str:
        """A token's text; for bytes that are no text "bytes:" and each byte as \\xNN, as OpenAI has
        it."""
        found = self._texts.get(token)
        if found is None:
            data = self.bytes_of(token)
            try:
                found = data.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token] = found
        return found

    def _read(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"token_id:{token}".encode()
        if token in self._special:
            return self._special[token]
        pieces = tokenizer.byte_pieces
        if pieces is not None:
            return pieces[token]
        written = tokenizer.backend.id_to_token(token)
        if written is None:
            return b""
        byte = _BYTE_TOKEN.fullmatch(written)  # of tokenizers with byte fallback
        if byte:
            return bytes([int(byte[1], 16)])
        if "\u2581" in written:  # the mark of a space; decoding one token alone drops a first one
            return written.replace("\u2581", " ").encode()
        return tokenizer.detokenize([token], skip_special_tokens=False).encode()


class SpecialTokensView:
    """A tokenizer whose texts hold some of the special tokens, for `TokenText`: the texts `kept`,
    or all of them if that is None.

    Attributes:
        marks: id -> character of tokens that stand in texts as one that nothing else gives.
        dropped: ids of the special tokens that texts leave out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kept: Iterable[str] | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.eod = tokenizer.eod
        self.marks = marks or {}
        special = {i: text for i, text in special_pieces(tokenizer).items() if i not in self.marks}
        wanted = None if kept is None else {text.encode() for text in kept}
        self._kept = {i: text for i, text in special.items() if wanted is None or text in wanted}
        self.dropped = special.keys() - self._kept.keys()
        runs = tokenizer.byte_runs
        hidden = frozenset(self.dropped)
        self.byte_runs = None if runs is None else runs._replace(hidden=hidden)
        pieces = tokenizer.byte_pieces
        self.byte_pieces: BytePieces | None = None
        if isinstance(pieces, BytePieces):
            self.byte_pieces = BytePieces(tokenizer.backend)
            self.byte_pieces.update(self._kept)

    def detokenize(self, ids: Any) -> str:
        """Text of token ids, with the special tokens that are kept."""
        kept = [token for token in ids if token not in self.dropped]
        return "".join(
            self._tokenizer.detokenize(list(run), skip_special_tokens=False)
            if mark is None
            else mark * len(list(run))
            for mark, run in groupby(kept, self.marks.get)
        )


def special_pieces(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The text of each special token, as UTF-8."""
    return {index: text.encode() for index, text in hidden_tokens(tokenizer.backend).items()}
