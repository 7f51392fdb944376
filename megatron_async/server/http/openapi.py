"""`/openapi.json`: what is served, made from the structs that requests are decoded into."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from megatron_async.server.endpoints import ENDPOINTS
from megatron_async.server.fields.ask_messages import CountTokensRequest
from megatron_async.server.fields.not_served import KnownFields, not_served_by
from megatron_async.version import __version__

BODIES: dict[str, type[KnownFields]] = {
    **{path: endpoint.kind for path, endpoint in ENDPOINTS.items()},
    "/v1/messages/count_tokens": CountTokensRequest,
}
READ = ("/v1/models", "/health", "/ready", "/version", "/metrics")
PLACE = "#/components/schemas/{name}"


@cache
def openapi() -> bytes:
    """The document, JSON of OpenAPI 3.1."""
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template=PLACE)
    for body in BODIES.values():
        for name in not_served_by(body, of_prompts=body is CountTokensRequest):
            schemas[body.__name__]["properties"].pop(name)
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    answers: dict[str, Any] = {
        "200": {"description": "The answer; events of server-sent events if `stream` is true."},
        "4XX": {
            "description": "What is wrong.",
            "content": {"application/json": {"schema": error}},
        },
    }
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        reference = {"$ref": PLACE.format(name=body.__name__)}
        content = {"application/json": {"schema": reference}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content},
                                "responses": answers}}  # fmt: skip
    for path in READ:
        paths[path] = {"get": {"responses": answers}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "megatron_async", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    return msgspec.json.encode(document)
