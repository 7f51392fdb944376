"""`response_format` and `structured_outputs` as the engine's `StructuredOutput`."""

from __future__ import annotations

import json
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.request_bodies import (
    ResponseFormat,
    SharedFields,
    StructuredOutputs,
)
from megatron_async.text.structured_output import StructuredOutput

ANY_OBJECT = {"type": "object"}
NOT_SERVED = {
    "structural_tag": "use json, regex, choice, grammar or json_object",
    "whitespace_pattern": "use disable_any_whitespace, or a grammar",
    "disable_additional_properties": "write additionalProperties: false into the schema",
}
KINDS = ("json", "regex", "choice", "grammar", "json_object")


def structured_output(request: SharedFields) -> StructuredOutput | None:
    """The required format of the text, or None. Whether a grammar compiles is found out later,
    beside the engine."""
    found = _of_response_format(request.response_format)
    if request.structured_outputs is not None:
        other = _of_structured_outputs(request.structured_outputs)
        if found is not None and other is not None:
            raise Refusal(
                "a response format and structured_outputs were both given: give one of them.",
                param="structured_outputs",
            )
        if other is not None:
            found = other
    return None if found is None else checked(found, format_field(request))


def format_field(request: SharedFields) -> str:
    """The field that asks for a format."""
    wanted = request.response_format
    is_given = wanted is not None and wanted.type != "text"
    return "response_format" if is_given else "structured_outputs"


def checked(wanted: StructuredOutput, param: str) -> StructuredOutput:
    """Check the form and size of `wanted`; returns it with its schema as text."""
    try:
        fixed = wanted.fixed()
        fixed.source()
    except RequestError as error:
        raise Refusal(f"{param}: {error}", param=param) from error
    return fixed


def _of_response_format(wanted: ResponseFormat | None) -> StructuredOutput | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        given = ANY_OBJECT if wanted.schema is None else wanted.schema
        return StructuredOutput(json_schema=_as_object(given, "response_format"))
    if wanted.type != "json_schema":
        allowed = '"text", "json_object" or "json_schema"'
        raise not_allowed("response_format", wanted.type, allowed)
    schema = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
    if schema is None:
        raise Refusal(
            "response_format has no json_schema.schema: give the schema.", param="response_format"
        )
    return StructuredOutput(json_schema=_as_object(schema, "response_format"))


def _of_structured_outputs(wanted: StructuredOutputs) -> StructuredOutput | None:
    for name, remedy in NOT_SERVED.items():
        if getattr(wanted, name) not in (None, False):
            raise Refusal(
                f"structured_outputs.{name} is not served: {remedy}.", param="structured_outputs"
            )
    given = [name for name in KINDS if getattr(wanted, name) not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        raise Refusal(
            f"structured_outputs has {' and '.join(given)}: give one of them.",
            param="structured_outputs",
        )
    if given[0] == "json_object":
        return StructuredOutput(json_schema=_compact(ANY_OBJECT, wanted))
    if given[0] == "json":
        schema = wanted.json
        if isinstance(schema, str):
            schema = _parsed(schema)
        return StructuredOutput(
            json_schema=_compact(_as_object(schema, "structured_outputs"), wanted)
        )
    return StructuredOutput(**{given[0]: getattr(wanted, given[0])})


def _compact(schema: dict[str, Any], wanted: StructuredOutputs) -> dict[str, Any]:
    """The schema, without free whitespace if that is wanted (llguidance's own option for it)."""
    if not wanted.disable_any_whitespace:
        return schema
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def _as_object(schema: Any, param: str) -> dict[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise Refusal("a JSON schema must be an object.", param=param)
    return schema


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"structured_outputs.json is no JSON: {error}.", param="structured_outputs"
        ) from error
