"""`TokenNames`: what tokens are called in log probs."""

from __future__ import annotations

from megatron_async.text.tokenizer import Tokenizer


class TokenNames:
    """Text and bytes of single tokens.

    Args:
        tokenizer: of the model; None: tokens are called by their ids.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token: int, by_id: bool = False) -> tuple[str, bytes]:
        """The token as text, and its real bytes (half a character has no text of its own).

        Args:
            token: its id.
            by_id: call it "token_id:123", as vLLM does on demand.
        """
        if by_id or self._tokenizer is None:
            name = f"token_id:{token}"
            return name, name.encode()
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, bytes]:
        assert self._tokenizer is not None, "looked at above"
        pieces = self._tokenizer.byte_pieces
        special = self._tokenizer.detokenize([token], skip_special_tokens=False)
        data = pieces[token] if pieces is not None else b""
        if not data:  # a special token, or a tokenizer whose texts are no bytes in a row
            return special, special.encode()
        return data.decode(errors="replace"), data
