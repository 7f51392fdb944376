"""`start_text_gen_server`: this project's HTTP server, started as Megatron does.

The server is `megatron-async serve --coordinator`, a process of its own (docs/server.md).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megatron_async.communication.bootstrap import LOOPBACK
from megatron_async.communication.host import is_loopback, own_address
from megatron_async.compat.conversions.errors import refuse
from megatron_async.server.chat.call_formats import REASONING, format_of_template, parser_name
from megatron_async.server.supervisor.keys import OPEN_VARIABLE, is_open_server, read_keys
from megatron_async.server.supervisor.listener import listen
from megatron_async.server.supervisor.processes import MODULE
from megatron_async.server.supervisor.serve_settings import ServeSettings

logger = logging.getLogger("megatron_async")

END_S = 10.0
"""The server has so long to end in order; then it is killed."""

_server: subprocess.Popen[bytes] | None = None


def start_text_gen_server(
    coordinator_addr: str,
    tokenizer: Any,
    rank: int,
    server_port: int,
    parsers: Sequence[str] | None = None,
    verbose: bool = False,
    num_replicas: int = 4,
    hostname: str | None = None,
    sock: socket.socket | None = None,
    chat_template: str | None = None,
) -> None:
    """Start the HTTP server in processes of its own; where one runs, a warning says so.

    Args:
        coordinator_addr: of the coordinator.
        tokenizer: no effect: engines tell the coordinator theirs.
        rank: of the caller; no effect.
        server_port: where it listens; 0: any free port, which its log names.
        parsers: Megatron's names, as "qwen3-coder-tool" and "deepseek-r1-reasoning"; one may be of
            tool calls, and one of thoughts. None: by the chat template.
        verbose: no effect; requests are counted at /metrics.
        num_replicas: processes that speak HTTP.
        hostname: name or address to listen at. None is 0.0.0.0, all networks, where the
            environment variable MEGATRON_ASYNC_API_KEY has a key, or MEGATRON_ASYNC_OPEN_SERVER is
            1; else loopback and this host's address in the job (on the route to MASTER_ADDR, or
            MEGATRON_ASYNC_INTERFACE's), without a key.
        sock: a bound socket, in place of port and name.
        chat_template: main's: Jinja text in place of the tokenizer's own template.

    Raises:
        ConfigurationError: an argument is not served, or other hosts could use the model without a
            key.
    """
    global _server
    if _server is not None and _server.poll() is None:
        logger.warning("A text generation server runs already: stop_text_gen_server ends it.")
        return
    names = [name for name in parsers or () if parser_name(name) not in REASONING]
    thoughts = [name for name in parsers or () if name not in names]
    kinds = {format_of_template("", name).name for name in names}
    if len(kinds) > 1 or len(set(map(parser_name, thoughts))) > 1:
        found = names if len(kinds) > 1 else thoughts
        refuse(f"parsers={found}", "give one of them, or none: the chat template says which")
    keys, environment = read_keys([], None, os.environ), dict(os.environ)
    with contextlib.ExitStack() as stack:
        own = [] if sock is None else [stack.enter_context(sock.dup())]
        if hostname is None and sock is None and not keys and not is_open_server(os.environ):
            own = _in_the_job(server_port, stack)
            environment[OPEN_VARIABLE] = "1"  # to the job's network, which the caller has chosen
        fds = tuple(each.fileno() for each in own)
        host = hostname or "0.0.0.0"
        # What is wrong is an error here, not in another process' log.
        settings = ServeSettings(
            model=None, coordinator=coordinator_addr, host=host, port=server_port,
            api_processes=num_replicas, keys=keys, listener_fds=fds, as_megatron=True,
            needs_key=not is_open_server(environment),
        )  # fmt: skip
        command = [
            # It ends with this process.
            sys.executable, "-m", MODULE, str(os.getpid()), "-1", "0", "serve",
            "--coordinator", coordinator_addr, "--host", host, "--port", str(server_port),
            "--api-processes", str(num_replicas), "--as-megatron",
            *(["--fd", *map(str, fds)] if fds else []),
        ]  # fmt: skip
        if not settings.is_exposed:
            command += ["--allowed-host", "0.0.0.0"]  # so megatron.rl calls this host
        if chat_template is not None:
            command.append(f"--chat-template={chat_template}")
        if thoughts:
            command += ["--reasoning-parser", thoughts[0]]
        if names:
            command += ["--tool-parser", names[0]]
        _server = subprocess.Popen(command, pass_fds=fds, env=environment)
        where = [each.getsockname()[:2] for each in own] or (host, server_port)
    atexit.register(stop_text_gen_server)
    logger.info("The HTTP server is process %d, at %s.", _server.pid, where)


def _in_the_job(port: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Sockets that listen for this host and, where that is another address, for hosts of the
    job; `stack` closes them."""
    found = [stack.enter_context(listen(LOOPBACK, port))]
    address = own_address(os.environ.get("MASTER_ADDR", LOOPBACK))
    if not is_loopback(address):
        found.append(stack.enter_context(listen(address, found[0].getsockname()[1])))
    return found


def stop_text_gen_server() -> None:
    """End the HTTP server; requests under way are aborted. Without one nothing happens."""
    global _server
    server, _server = _server, None
    atexit.unregister(stop_text_gen_server)
    if server is None or server.poll() is not None:
        return
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(0.5)
        return
    server.terminate()  # the second signal: at once
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
