"""Structured output: what a request may generate, as a JSON schema, a regular expression, a grammar
or a choice, and which tokens that leaves at each place.

Grammars are the work of llguidance (guidance-ai), which computes a mask in about 50 microseconds.
"""

from __future__ import annotations

import json
import re
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_async.errors import RequestError
from megatron_async.text.grammar_limits import (
    MAX_RULES,
    check_choice,
    check_grammar,
    check_regex,
    check_schema,
    check_size,
    check_width,
    exact_numbers,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEPT = 16
"""Texts and schemas that were checked last."""
ALLOWANCE_S = 0.005
"""CPU seconds of a request's grammar for each token: to make its mask, and to advance by it."""
CREDIT_S = 0.1
"""CPU seconds: a request that exceeds its allowance by more fails, since it delays the batch."""

_SCHEMA_IN_LARK = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class StructuredOutput:
    """The required format of a request's text; give exactly one of the fields.

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

    def fixed(self) -> StructuredOutput:
        """A copy with the schema as text, which cannot change while it is compiled.

        Raises:
            RequestError: as `source`.
        """
        if self.json_schema is None:
            return self
        return replace(self, json_schema=_schema_text(self.json_schema))

    def source(self) -> str:
        """The grammar as llguidance takes it.

        Raises:
            RequestError: not exactly one field is given, or it is of the wrong type, or it is too
                large or too deep (`text/grammar_limits.py`).
        """
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_output has {' and '.join(given) or 'nothing'}: give exactly one of "
                "json_schema, regex, grammar and choice."
            )
        name, value = given[0], getattr(self, given[0])
        if name == "json_schema":
            return _source_of(name, _schema_text(value))
        if name == "choice":
            is_list = isinstance(value, list) and value
            if is_list:
                check_choice(value)
            if not is_list or not all(isinstance(text, str) and text for text in value):
                raise RequestError(
                    f"choice={reprlib.repr(value)} is not allowed: it must be a list of texts, "
                    "none empty."
                )
            check_size("choice", sum(map(len, value)))
            return _source_of("choice", "|".join(f"({re.escape(text)})" for text in value))
        if not isinstance(value, str) or not value:
            raise RequestError(
                f"{name}={reprlib.repr(value)} is not allowed: it must be a text, not empty."
            )
        check_size(name, len(value))
        return _source_of(name, value)


class TokenGrammar:
    """The state of one request's grammar; llguidance's matcher, at its beginning, is taken over.
    `behind_s`: CPU seconds by which it has exceeded its allowance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._failure: Exception | str | None = None
        self.behind_s = 0.0

    def accept(self, token: int) -> None:
        """Take the token that was sampled.

        Raises:
            RequestError: the grammar does not allow it (nothing was left to sample), or gave up.
        """
        start = time.thread_time()
        is_accepted = self._failure is None and self._matcher.consume_token(token)
        self.behind_s += time.thread_time() - start
        if not is_accepted:
            reason = self._failure or self._matcher.get_error() or "the grammar has ended"
            raise RequestError(
                f"the grammar does not allow token {token} ({reason}): bans and the grammar may "
                "leave no token together, or the grammar is too complex; relax one of them."
            )

    def replay(self, tokens: Sequence[int]) -> None:
        """Take the tokens of a request that was moved.

        Raises:
            RequestError: as `accept`, or they are complete.
        """
        for token in tokens:
            self.accept(token)
        self.behind_s = 0.0  # each of them had its allowance
        if tokens and self.is_complete:
            raise RequestError(f"the moved request has ended: its {len(tokens)} tokens are whole.")

    @property
    def failure(self) -> Exception | str | None:
        """Why the last mask allowed nothing, if the grammar gave up on it."""
        return self._failure

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come any more but the end."""
        return self._matcher.is_stopped()

    def mask(self, out: NDArray[np.int32]) -> None:
        """Write which tokens may come next into int32 `[words]`, C-contiguous; bit i % 32 of word i
        // 32 is token i."""
        start = time.thread_time()
        try:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        except Exception as failure:
            # Others are in the same step: it goes on, and this request has no token to choose.
            self._failure = failure
            out[:] = 0
        spent_s = time.thread_time() - start
        self.behind_s = max(self.behind_s + spent_s - ALLOWANCE_S, 0.0)

    @property
    def is_too_slow(self) -> bool:
        """Whether its request must fail, for the sake of those beside it."""
        return self.behind_s > CREDIT_S


@lru_cache(KEPT)
def _source_of(name: str, text: str) -> str:
    """The grammar of a field's text as llguidance takes it. Kept, because a request with many
    answers asks for each of them, on the engine's thread."""
    from llguidance import LLMatcher

    if name == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if name == "choice":
        return LLMatcher.grammar_from_regex(text)
    if name == "regex":
        check_regex(text)
        return LLMatcher.grammar_from_regex(text)
    check_grammar(text)
    _check_schemas_in(text)
    return LLMatcher.grammar_from_lark(text)


def _check_schemas_in(grammar: str) -> None:
    """Raise RequestError for a `%json` of a Lark grammar that is too deep, or has a number that
    would not be kept."""
    place = count = 0
    while found := _SCHEMA_IN_LARK.search(grammar, place):
        count, place = count + 1, found.end()
        if count > MAX_RULES:
            raise RequestError(
                f"grammar has more than {MAX_RULES} schemas (%json): join some of them."
            )
        try:
            schema, place = _DECODER.raw_decode(grammar, place)
        except (ValueError, RecursionError):
            continue  # the library refuses it, or it is a text of the grammar
        check_schema(schema)
        check_width(schema)
        exact_numbers(schema)


def _schema_text(schema: Any) -> str:
    """A JSON schema as text."""
    return _text_of_schema(schema) if isinstance(schema, str) else _as_text(schema)


@lru_cache(KEPT)
def _text_of_schema(schema: str) -> str:
    return _as_text(schema)


def _as_text(schema: Any) -> str:
    if not isinstance(schema, str | Mapping):
        raise RequestError(
            f"json_schema={reprlib.repr(schema)} is not allowed: it must be a dict, or the text of "
            "a JSON object."
        )
    if isinstance(schema, str):
        check_size("json_schema", len(schema))
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        text = json.dumps(found)
        found = json.loads(text)  # what was a mapping or a tuple is a dict or a list now
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema is no JSON object: {error}.") from error
    except RecursionError as error:
        raise RequestError(
            "json_schema is nested too deeply to be read as JSON: nest it less deeply."
        ) from error
    check_size("json_schema", len(text))
    check_schema(found)
    check_width(found)
    return json.dumps(exact_numbers(found))
