"""`HttpServer`: uvicorn with our connections, in a process that has signals of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.app import App
from megatron_async.server.http.protocol import HttpProtocol

KEEP_ALIVE_S = 75
"""A connection may be silent so long between two requests; proxies, which give up after 60 s, are
first then."""


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are its process' own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the process has handlers."""
        yield


class HttpServer:
    """Serves an application on a socket."""

    def __init__(self, app: App, config: ApiConfig) -> None:
        tls = config.tls
        self._server = _Server(
            uvicorn.Config(
                app,
                interface="asgi3",
                proxy_headers=False,  # nothing here reads a client's word about its address
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                # Before the supervisor, whose limit it is, ends the process.
                timeout_graceful_shutdown=max(int(config.shutdown_timeout_s) - 1, 1),
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
                ssl_keyfile_password=None if tls is None else tls.password,
            )
        )

    async def serve(self, *listeners: socket.socket) -> None:
        """Serve until `stop`; then take no connection, finish what is in flight and end. Several
        processes may share the listeners."""
        await self._server.serve(list(listeners))

    def stop(self) -> None:
        """End `serve`; the second call ends it at once."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True
