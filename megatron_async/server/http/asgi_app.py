"""`AsgiApp`: the HTTP application of `serve` as plain ASGI, for servers that are not ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_async.errors import ConfigurationError
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.access import Access
from megatron_async.server.http.answer_connection import AsgiConnection
from megatron_async.server.http.app import App, Route
from megatron_async.server.http.generate_routes import GenerateRoutes
from megatron_async.server.http.replies import Send
from megatron_async.server.http.service_routes import ServiceRoutes
from megatron_async.server.stream_hub import StreamHub
from megatron_async.server.tracing import RequestTracer
from megatron_async.serving.token_client import RequestClient


def make_app(
    client: RequestClient,
    config: ApiConfig,
    hub: StreamHub,
    tracer: RequestTracer | None = None,
    further: Sequence[Route] = (),
) -> App:
    """The routes of an API process. The caller lets the hub flush behind what the client tells."""
    generate = GenerateRoutes(client, config, hub, tracer)
    service = ServiceRoutes(client, config, generate.shown_name)
    routes = [*service.routes(), *generate.routes(), *further]
    return App(
        routes, Access(config), config.root_path, config.log_requests, make_ready=generate.prepare
    )


class Lifespan(Protocol):
    """What begins and ends with the server that an `AsgiApp` stands behind."""

    async def begin(self) -> None:
        """Begin; the server takes no request before. Raises ConfigurationError: the server must not
        begin."""

    async def end(self) -> None:
        """End; the server takes no request any more."""


class AsgiApp:
    """The routes behind a server that is not ours. Limits of connections (time and size of
    headers, time of bodies) are that server's; all else is as in an API process."""

    def __init__(self, app: App, lifespan: Lifespan | None = None) -> None:
        self._app = app
        self._lifespan = lifespan

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """One request of ASGI, or the beginning and end of the server ("lifespan")."""
        if scope["type"] == "lifespan":
            await _follow_lifespan(receive, send, self._lifespan)
            return
        if scope["type"] != "http":
            return
        connection = AsgiConnection(receive, send)
        state = {**scope.get("state", {}), "connection": connection}
        try:
            await self._app({**scope, "state": state}, receive, connection.send)
        finally:
            connection.close()


async def _follow_lifespan(receive: Any, send: Send, lifespan: Lifespan | None) -> None:
    while True:
        kind = (await receive())["type"]
        is_end = kind == "lifespan.shutdown"
        try:
            if lifespan is not None:
                await (lifespan.end() if is_end else lifespan.begin())
        except ConfigurationError as error:
            await send({"type": f"{kind}.failed", "message": str(error)})
            return
        await asyncio.sleep(0)
        await send({"type": f"{kind}.complete"})
        if is_end:
            return
