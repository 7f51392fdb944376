"""`AsgiApp`: the HTTP application of `serve` as plain ASGI, for servers that are not ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from megatron_async.errors import ConfigurationError
from megatron_async.server.answer_stream import StreamHub
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.access import Access
from megatron_async.server.http.answer_connection import AsgiConnection
from megatron_async.server.http.app import App, Route
from megatron_async.server.http.generate_routes import GenerateRoutes
from megatron_async.server.http.replies import Send
from megatron_async.server.http.server import HttpServer
from megatron_async.server.http.service_routes import ServiceRoutes
from megatron_async.server.rl.sglang import SglangPaths
from megatron_async.server.rl.vllm import VllmPaths
from megatron_async.server.supervisor.listener import listen
from megatron_async.server.tracing import RequestTracer
from megatron_async.serving.token_client import RequestClient

logger = logging.getLogger("megatron_async")

FAMILIES = {"vllm": VllmPaths, "sglang": SglangPaths}
"""Values of `--rl-api` beside "none"."""


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
    if config.rl_api in FAMILIES:  # what is ours and theirs has their meaning
        routes += FAMILIES[config.rl_api](client, config).routes()
    return App(
        routes, Access(config), config.root_path, config.log_requests, make_ready=generate.prepare
    )


class OwnPort:
    """Serves an ingress' routes from the ingress' begin to its end.

    A manager's proxy passes each write of a stream on by a call of its own: for 100 streams Ray's
    proxy and ingress took 6.5 s of CPU time where `serve` took 0.5 beside its engines
    (docs/records/ray.md). Clients of this port come without it. Ingresses on one host share the
    port."""

    def __init__(self, app: App, config: ApiConfig, host: str, port: int) -> None:
        self._server = HttpServer(app, config)
        self._address = host, port
        self._serving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Listen.

        Raises:
            ConfigurationError: the address is in use, or not one of this host.
        """
        listener = listen(*self._address, is_shared=True)
        self._serving = asyncio.create_task(self._server.serve(listener))
        self._serving.add_done_callback(self._ended)

    async def end(self) -> None:
        """Take no connection any more, finish what is in flight, and end."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.stop()
            await serving

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if self._serving is serving:
            logger.error("Nobody listens at %s:%d any more: %r", *self._address, serving)


class AsgiApp:
    """The routes behind a server that is not ours. Limits of connections (time and size of
    headers, time of bodies) are that server's; all else is as in an API process."""

    def __init__(self, app: App, own_port: OwnPort | None = None) -> None:
        self._app = app
        self._own_port = own_port

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """One request of ASGI, or the beginning and end of the server ("lifespan")."""
        if scope["type"] == "lifespan":
            await _follow_lifespan(receive, send, self._own_port)
            return
        if scope["type"] != "http":
            return
        connection = AsgiConnection(receive, send)
        state = {**scope.get("state", {}), "connection": connection}
        try:
            await self._app({**scope, "state": state}, receive, connection.send)
        finally:
            connection.close()


async def _follow_lifespan(receive: Any, send: Send, own_port: OwnPort | None) -> None:
    while True:
        kind = (await receive())["type"]
        is_end = kind == "lifespan.shutdown"
        try:
            if own_port is not None:
                await (own_port.end() if is_end else own_port.begin())
        except ConfigurationError as error:
            await send({"type": f"{kind}.failed", "message": str(error)})
            return
        await asyncio.sleep(0)
        await send({"type": f"{kind}.complete"})
        if is_end:
            return
