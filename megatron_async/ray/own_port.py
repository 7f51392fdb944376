"""`OwnPort`: HTTP of an ingress on a port of its own, beside its manager's proxy."""

from __future__ import annotations

import asyncio
import logging

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.app import App
from megatron_async.server.http.server import HttpServer
from megatron_async.server.supervisor.listener import listen

logger = logging.getLogger("megatron_async")


class OwnPort:
    """Serves an ingress' routes from the ingress' begin to its end; a `Lifespan`.

    A manager's proxy passes each write of a stream on by a call of its own: for 100 streams Ray's
    proxy and ingress took 6.5 s of CPU time where `serve` took 0.5 beside its engines
    (docs/records/ray.md). Clients of this port come without it. Ingresses on one host share the
    port."""

    def __init__(self, app: App, config: ApiConfig, host: str, port: int) -> None:
        self._server = HttpServer(app, config)
        self._address = host, port
        self._serving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Listen. Raises ConfigurationError: the address is in use, or not one of this host."""
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
