"""`ToolTypes`: the JSON types of a tool's parameters, as far as its schema says them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.text.grammar_limits import resolve

KINDS = {
    dict: "object", list: "array", bool: "boolean", str: "string", int: "integer", float: "number",
    type(None): "null",
}  # fmt: skip
_OTHER_NAMES = {
    "int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object",
    "list": "array",
}  # fmt: skip
"""Python's names of types, which people write instead of JSON schema's."""
_OF_KIND = {"properties": "object", "items": "array", "pattern": "string", "format": "string"}
MAX_REFERENCES = 32
MAX_VISITS = 10_000
"""Alternatives and listed values of all parameters of a tool: each parameter may refer to the same
many ones, and they would be looked at for each of them."""


@dataclass(frozen=True, slots=True)
class ValueTypes:
    """What a value may be.

    Attributes:
        kinds: names of JSON types; none: the schema says nothing of them.
        texts: those that the schema lists.
        only: all values, if it lists them; else None.
    """

    kinds: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    only: list[Any] | None = None


@dataclass(slots=True)
class _Seen:
    """What the branches of one schema say. `is_open`: one of them lists no values."""

    kinds: set[str] = field(default_factory=set)
    only: list[Any] = field(default_factory=list)
    is_open: bool = False


class ToolTypes:
    """Types of one tool's parameters, each found once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._targets: dict[str, Any] = {}
        self._found: dict[str, ValueTypes] = {}
        self._visits_left = MAX_VISITS
        self.schema = self.target(root)

    def of_parameter(self, key: str) -> ValueTypes:
        """Types of a parameter in an answer; of one whose schema is too large, nothing is known."""
        found = self._found.get(key)
        if found is None:
            try:
                found = self.of_schema(
                    self.properties.get(key, self.schema.get("additionalProperties", True))
                )
            except RequestError:
                found = ValueTypes()
            self._found[key] = found
        return found

    def of_schema(self, schema: Any) -> ValueTypes:
        """Types of a value.

        Raises:
            RequestError: the tool's schemas have too many alternatives.
        """
        seen = _Seen()
        for own in self.branches(schema):
            constants = _constants(own)
            self._count(len(constants))
            _look(own, alternatives(own), constants, seen)
        kinds = seen.kinds | ({"integer"} if "number" in seen.kinds else set())
        texts = frozenset(value for value in seen.only if isinstance(value, str))
        return ValueTypes(frozenset(kinds), texts, None if seen.is_open else seen.only)

    @cached_property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters by name, also those of alternatives; a parameter of several of
        them may be as any says."""
        found: dict[str, list[Any]] = {}
        for own in self.branches(self.schema):
            given = own.get("properties")
            for key, schema in given.items() if isinstance(given, Mapping) else ():
                found.setdefault(key, []).append(schema)
        return {key: of[0] if len(of) == 1 else {"anyOf": of} for key, of in found.items()}

    @property
    def required(self) -> Mapping[str, None]:
        """Names of the parameters that every call has."""
        parts = self.schema.get("allOf")
        parts = parts if isinstance(parts, list) else []
        lists = [own.get("required") for own in (self.schema, *map(self.target, parts))]
        names = [key for keys in lists if isinstance(keys, list) for key in keys]
        return dict.fromkeys(key for key in names if isinstance(key, str))

    def branches(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """A schema and those that it is made of, each once: they may refer to one another."""
        visited: set[int] = set()
        to_visit = [schema]
        while to_visit:
            own = self.target(to_visit.pop())
            self._count(1)
            if id(own) not in visited:
                visited.add(id(own))
                to_visit += reversed(alternatives(own))
                yield own

    @property
    def lost(self) -> list[str]:
        """References that were followed, and name nothing in the tool's schema."""
        return [path for path, found in self._targets.items() if found is None]

    def target(self, schema: Any) -> Mapping[str, Any]:
        """A schema behind its references; {} where it is none, as true."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                return {}
            path = schema.get("$ref")
            if not isinstance(path, str):
                return schema
            if path not in self._targets:
                self._targets[path] = resolve(self.root, path)
            schema = self._targets[path]
        return {}

    def _count(self, visits: int) -> None:
        self._visits_left -= visits
        if self._visits_left < 0:
            raise RequestError(
                f"the parameters of one have more than {MAX_VISITS} alternatives and listed "
                "values, with those that each $ref names: give fewer."
            )


def alternatives(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas that a schema is made of."""
    found = [schema.get(key, ()) for key in ("anyOf", "oneOf", "allOf")]
    return [part for parts in found if isinstance(parts, list | tuple) for part in parts]


def _constants(own: Mapping[str, Any]) -> list[Any]:
    listed = own.get("enum")
    found = list(listed) if isinstance(listed, list | tuple) else []
    return [*found, own["const"]] if "const" in own else found


def _look(own: Mapping[str, Any], parts: list[Any], constants: list[Any], seen: _Seen) -> None:
    """Add what one branch says."""
    given = own.get("type", [])
    names = [str(name).lower() for name in (given if isinstance(given, list) else [given])]
    seen.kinds |= {_OTHER_NAMES.get(name, name) for name in names}
    if not names:
        seen.kinds |= {KINDS[type(value)] for value in constants if type(value) in KINDS}
        seen.kinds |= {kind for key, kind in _OF_KIND.items() if key in own}
    if own.get("nullable") is True:
        seen.kinds.add("null")
    if constants:
        seen.only += constants
    elif own.get("type") == "null":
        seen.only.append(None)
    elif "allOf" in own or not parts:
        seen.is_open = True
