"""`TokenText`: a request's text, made from its tokens in the engine's process, a client or a
server.

All returned texts together are the request's `generated_text`, for any division of its tokens. No
text is ever taken back: incomplete characters, a possible start of a stop word, and a token that
may have ended the request are held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_async.text.detokenize import (
    LONGEST_WINDOW,
    REPLACEMENT,
    ByteDetokenizer,
    IncrementalDetokenizer,
)
from megatron_async.text.stop_words import find_word, first_stop_word, held_back

ENDED_BY_TOKEN = ("termination_id", "stop_token")


class TextParams(Protocol):
    """The `SamplingParams` that make a text of tokens."""

    echo: bool
    detokenize_stop_sequence: bool
    termination_id: int | None
    stop_token_ids: list[int] | None
    stop_words: list[str] | None


class TokenText:
    """The text of one request's generated tokens, piece by piece.

    Where texts are the bytes of their tokens (`Tokenizer.byte_pieces`), a token costs one look-up.
    Other tokenizers decode the newest tokens together, and all of them at the end.

    Args:
        tokenizer: has `detokenize`; `byte_pieces`, `marks` and `eod` if it likes.
        params: of the request.
        prompt: text or token ids; it comes first if the request asks for an `echo`.

    Attributes:
        stop_word: the one that ended the request; None before the end, or where none did.
    """

    def __init__(
        self, tokenizer: Any, params: TextParams, prompt: str | Sequence[int] = ""
    ) -> None:
        self._detokenize = tokenizer.detokenize
        self._keeps_stop = params.detokenize_stop_sequence
        self._words = params.stop_words or ()
        self._held_back = held_back(self._words)
        last = params.termination_id
        last = getattr(tokenizer, "eod", None) if last is None else last
        self._stop_ids = frozenset((last, *(params.stop_token_ids or ())))
        self._held: list[int] = []
        """A last token that may have ended the request, or none."""
        pieces = getattr(tokenizer, "byte_pieces", None)
        # Bytes that are no character are found as a stop word only when another follows them.
        self._decoder: ByteDetokenizer | IncrementalDetokenizer
        if pieces is not None and not any(REPLACEMENT in word for word in self._words):
            self._decoder = ByteDetokenizer(pieces, getattr(tokenizer, "marks", None))
        else:
            self._decoder = IncrementalDetokenizer(self._detokenize)
        self._runs = getattr(tokenizer, "byte_runs", None)
        self._run: list[int] = []
        """Last tokens, of single bytes, which a next one may turn into replacement characters."""
        by_bytes = isinstance(self._decoder, ByteDetokenizer) and self._runs is None
        self._keeps_nothing = by_bytes and not self._words
        """Whether all settled text is returned at once."""
        self._tokens: list[int] = []
        """All of them, where the end needs them."""
        self._echo = ""
        if params.echo:
            is_text = isinstance(prompt, str)
            self._echo = str(prompt if is_text else self._detokenize(list(prompt)) or "")
        self._tail = ""
        """Settled text that was not returned."""
        self._num_returned = 0
        """Characters of the tokens' text."""
        self.stop_word: str | None = None

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that nothing can change any more, perhaps none."""
        if not len(tokens):
            return ""
        if self._held or tokens[-1] in self._stop_ids:
            tokens = [*self._held, *tokens]
            self._held = [tokens.pop()] if tokens[-1] in self._stop_ids else []
        if self._keeps_nothing and not self._echo:
            text = self._decoder.push_all(tokens)
            self._num_returned += len(text)
            return text
        known = len(self._tail)
        text = self._settle(tokens)
        end = len(text) - self._held_back
        for word in self._words:
            if (start := find_word(text, word, known)) >= 0:
                end = min(end, start)  # perhaps the request has ended by it
        return self._return(max(end, 0))

    def end(self, finish_reason: str | None, stop_words_from: int = 0) -> str:
        """The rest of the text; `push` must not be called afterwards. Stop words count after so
        many characters of the text."""
        if self._keeps_stop or finish_reason not in ENDED_BY_TOKEN:
            self._settle(self._held)
        if isinstance(self._decoder, ByteDetokenizer):
            self._tail += self._decoder.finish()
        else:
            whole = self._detokenize(self._tokens) or ""
            self._tail = whole[self._num_returned :]
        if finish_reason == "stop_word":
            behind = max(stop_words_from - self._num_returned, 0)
            start, end = first_stop_word(self._tail, self._words, behind)
            self.stop_word = self._tail[start:end] or None
            self._tail = self._tail[: end if self._keeps_stop else start]
        return self._return(len(self._tail))

    def _settle(self, tokens: Sequence[int]) -> str:
        """All that is not returned, with what these tokens settle."""
        if len(tokens):
            if not isinstance(self._decoder, ByteDetokenizer):
                self._tokens += tokens
            if self._runs is not None:
                tokens = [*self._run, *tokens]
                start = self._runs.open_from(tokens)
                if len(tokens) - start > LONGEST_WINDOW:  # a long wait, for a rare case
                    start = len(tokens)
                tokens, self._run = tokens[:start], tokens[start:]
            self._tail += self._decoder.push_all(tokens)
        return self._tail

    def _return(self, length: int) -> str:
        text, self._tail = self._tail[:length], self._tail[length:]
        self._num_returned += length
        if self._echo:
            text, self._echo = self._echo + text, ""
        return text
