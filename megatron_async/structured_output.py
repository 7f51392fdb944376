"""Structured output: what a request may generate, as a JSON schema, a regular expression, a grammar
or a choice, and which tokens that leaves at each place.

Grammars are the work of llguidance (guidance-ai), which computes a mask in about 50 microseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import RequestError

KEPT_GRAMMARS = 64
"""Compiled grammars that are kept for further requests."""


@dataclass(frozen=True)
class StructuredOutput:
    """What a request may generate; exactly one of the fields.

    Attributes:
        json_schema: the text is JSON of this schema (a dict, or its JSON text; `{}` is any JSON).
        regex: the text matches this regular expression, from its beginning to its end.
        grammar: the text is of this grammar, in llguidance's variant of Lark.
        choice: the text is one of these.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None

    def source(self) -> str:
        """The grammar as llguidance takes it.

        Raises:
            RequestError: not exactly one field is given, or it is of the wrong type.
        """
        from llguidance import LLMatcher

        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_output has {' and '.join(given) or 'nothing'}: give exactly one of "
                "json_schema, regex, grammar and choice."
            )
        name, value = given[0], getattr(self, given[0])
        if name == "json_schema":
            return LLMatcher.grammar_from_json_schema(_schema_text(value))
        if name == "choice":
            is_list = isinstance(value, list) and value
            if not is_list or not all(isinstance(text, str) and text for text in value):
                raise RequestError(
                    f"choice={value!r} is not allowed: it must be a list of texts, none empty."
                )
            return LLMatcher.grammar_from_regex("|".join(f"({re.escape(text)})" for text in value))
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name}={value!r} is not allowed: it must be a text, not empty.")
        if name == "regex":
            return LLMatcher.grammar_from_regex(value)
        return LLMatcher.grammar_from_lark(value)


class TokenGrammar:
    """How far one request is in its grammar.

    Args:
        matcher: llguidance's, at its beginning; taken over.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._failure: Exception | None = None

    def accept(self, token: int) -> None:
        """Take the token that was sampled.

        Raises:
            RequestError: the grammar does not allow it (nothing was left to sample), or gave up.
        """
        if self._failure is not None or not self._matcher.consume_token(token):
            reason = self._failure or self._matcher.get_error() or "the grammar has ended"
            raise RequestError(
                f"the grammar does not allow token {token} ({reason}): bans and the grammar may "
                "leave no token together, or the grammar is too complex; relax one of them."
            )

    @property
    def failure(self) -> Exception | None:
        """Why the last mask allowed nothing, if the grammar gave up on it."""
        return self._failure

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come any more but the end."""
        return self._matcher.is_stopped()

    def mask(self, out: NDArray[np.int32]) -> None:
        """Write which tokens may come next.

        Args:
            out: int32 `[words]`, C-contiguous; bit i % 32 of word i // 32 is token i.
        """
        try:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        except Exception as failure:
            # Others are in the same step: it goes on, and this request has no token to choose.
            self._failure = failure
            out[:] = 0


class GrammarCompiler:
    """Makes `TokenGrammar`s for one tokenizer.

    Args:
        tokenizer: of the engine, or None.
        vocab_size: columns of the logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._converted: Any = None
        self._compiled: dict[str, Any] = {}

    def compile(self, wanted: Any) -> TokenGrammar:
        """The beginning of a grammar. The first one takes a moment (llguidance builds a trie of
        the tokenizer's tokens); each is compiled once.

        Raises:
            RequestError: it is no `StructuredOutput`, it is not valid, or there is no tokenizer
                that llguidance can read.
        """
        from llguidance import LLMatcher

        if not isinstance(wanted, StructuredOutput):
            raise RequestError(
                f"structured_output={wanted!r} is not allowed: it must be a StructuredOutput."
            )
        source = wanted.source()
        tokenizer = self._token_trie()
        matcher = self._compiled.get(source)
        if matcher is None:
            error = LLMatcher.validate_grammar(source, tokenizer)
            if error and not error.startswith("WARNING"):
                raise RequestError(f"structured_output is not valid: {error.strip()}")
            matcher = LLMatcher(tokenizer, source, log_level=0)
            if matcher.is_error():
                raise RequestError(f"structured_output is not valid: {matcher.get_error()}")
            while len(self._compiled) >= KEPT_GRAMMARS:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[source] = matcher
        return TokenGrammar(matcher.deep_copy())

    def _token_trie(self) -> Any:
        from llguidance import LLTokenizer

        if self._converted is None:
            backend = getattr(self._tokenizer, "backend", None)
            if backend is None or getattr(self._tokenizer, "eod", None) is None:
                raise RequestError(
                    "structured_output needs a megatron_async Tokenizer with an end-of-sequence "
                    f"token, but this engine has {type(self._tokenizer).__name__}: give the model "
                    "its tokenizer folder."
                )
            ends = list(self._tokenizer.eos_ids) or [self._tokenizer.eod]
            eos = ends if len(ends) > 1 else ends[0]
            self._converted = LLTokenizer(
                backend.to_str(), n_vocab=self._vocab_size, eos_token=eos
            )
        return self._converted


def _schema_text(schema: Any) -> str:
    """A JSON schema as text."""
    if not isinstance(schema, str | Mapping):
        raise RequestError(
            f"json_schema={schema!r} is not allowed: it must be a dict, or the text of a JSON "
            "object."
        )
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        return json.dumps(found)
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema={schema!r} is no JSON object: {error}") from error
