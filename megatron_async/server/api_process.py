"""An API process: HTTP on inherited listeners, in front of a coordinator.

It imports neither torch nor Megatron-Core nor transformers: a test asserts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.observe.log_lines import log_to_stderr
from megatron_async.server.answer_stream import StreamHub
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.asgi_app import make_app
from megatron_async.server.http.page_routes import LiveRoutes, page_routes
from megatron_async.server.http.server import HttpServer
from megatron_async.server.tracing import make_tracer
from megatron_async.serving.secret import read_secret
from megatron_async.serving.token_client import TokenClient

logger = logging.getLogger("megatron_async")

CONNECT_S = 10.0
"""Seconds of waiting for a coordinator; then the process is started again."""


def run_api_process(config: ApiConfig, listener_fds: Sequence[int]) -> int:
    """Serve until SIGTERM: then take no connection, finish what is in flight and end; at the second
    one end at once. Several processes may share the listeners.

    Returns:
        the exit status: 0, or 1 where there is no coordinator.
    """
    import uvloop

    log_to_stderr(config.name)
    return uvloop.run(_serve(config, listener_fds))


async def _serve(config: ApiConfig, listener_fds: Sequence[int]) -> int:
    secret = None if config.secret_file is None else read_secret(config.secret_file)
    client = TokenClient(config.coordinator, connect_timeout_s=CONNECT_S, secret=secret)
    try:
        await client.open()
    except (CoordinatorLost, ConfigurationError) as error:
        logger.error("This API process has no coordinator and ends: %s", error)
        return 1
    hub = StreamHub()
    client.after_message = hub.flush
    further = LiveRoutes(client, config).routes()
    if config.page:
        further += page_routes()
    tracer = make_tracer(config.otlp_endpoint, os.environ)
    app = make_app(client, config, hub, tracer, further)
    server = HttpServer(app, config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(fileno=fd)) for fd in listener_fds]
        preparing = loop.create_task(app.prepare())
        await server.serve(*listeners)
        preparing.cancel()
    await client.close()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    return 0
