"""`/openapi.json` of what is served, made from the structs that requests are decoded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_async.server.answers.responses import ChatAnswer, CompletionAnswer, ErrorAnswer
from megatron_async.server.fields.chat_request import ChatRequest
from megatron_async.server.fields.completion_request import CompletionRequest

POSTED: dict[str, tuple[str, type, type]] = {
    "/v1/completions": ("Completions", CompletionRequest, CompletionAnswer),
    "/v1/chat/completions": ("The next message of a chat", ChatRequest, ChatAnswer),
}
"""Path -> summary, body, answer."""
ERRORS = {
    "400": "The request is not allowed", "401": "No valid key", "404": "No such model",
    "408": "The request came too slowly", "413": "The body is too large",
    "503": "The service is full or draining",
}  # fmt: skip


def openapi(
    version: str, posted: Mapping[str, tuple[str, type, type]] | None = None
) -> dict[str, Any]:
    """The document, as JSON values.

    Args:
        version: of the package.
        posted: further endpoints: path -> summary, struct of the body, struct of the answer.
    """
    endpoints = POSTED | dict(posted or {})
    kinds = [kind for _, body, answer in endpoints.values() for kind in (body, answer)]
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(
        [*kinds, ErrorAnswer], ref_template=template
    )
    failed = {
        status: {"description": text, "content": _json(schemas[-1])}
        for status, text in ERRORS.items()
    }
    paths = {
        path: {
            "post": {
                "summary": summary,
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {"required": True, "content": _json(schemas[2 * i])},
                "responses": {
                    "200": {
                        "description": "The answer; with `stream`, events of it",
                        "content": _json(schemas[2 * i + 1])
                        | {"text/event-stream": {"schema": {"type": "string"}}},
                    },
                    **failed,
                },
            }
        }
        for i, (path, (summary, _, _)) in enumerate(endpoints.items())
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "megatron_async", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
