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

from megatron_async.compat.conversions.errors import refuse

logger = logging.getLogger("megatron_async")

END_S = 10.0
"""The server has so long to end in order; then it is killed."""
REASONING_PARSERS = ("deepseek_r1", "nemotron_v3", "super_v3", "ultra_v3")
"""Megatron's parsers of thoughts, which are always read here."""

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
            tool calls. None: by the chat template.
        verbose: no effect; requests are counted at /metrics.
        num_replicas: processes that speak HTTP.
        hostname: name or address to listen at. None is 0.0.0.0, all networks, which needs an API
            key in the environment variable MEGATRON_ASYNC_API_KEY.
        sock: a bound socket, in place of port and name.
        chat_template: main's: Jinja text in place of the tokenizer's own template.

    Raises:
        ConfigurationError: an argument is not served, or other hosts could use the model without a
            key.
    """
    global _server
    from megatron_async.server.chat.call_formats import format_of_template, parser_name
    from megatron_async.server.supervisor.keys import read_keys
    from megatron_async.server.supervisor.serve_settings import ServeSettings

    if _server is not None and _server.poll() is None:
        logger.warning("A text generation server runs already: stop_text_gen_server ends it.")
        return
    names = [name for name in parsers or () if parser_name(name) not in REASONING_PARSERS]
    if len({format_of_template("", name).name for name in names}) > 1:
        refuse(f"parsers={names}", "give one of them, or none: the chat template says which")
    host = "0.0.0.0" if hostname is None else hostname
    fds = () if sock is None else (sock.fileno(),)
    # What is wrong is an error here, not in another process' log.
    ServeSettings(
        model=None, coordinator=coordinator_addr, host=host, port=server_port,
        api_processes=num_replicas, keys=read_keys([], None, os.environ),
        listener_fd=fds[0] if fds else None,
    )  # fmt: skip
    command = [
        sys.executable, "-m", "megatron_async", "serve", "--coordinator", coordinator_addr,
        "--host", host, "--port", str(server_port), "--api-processes", str(num_replicas),
        "--as-megatron", *(f"--fd={fd}" for fd in fds),
    ]  # fmt: skip
    if chat_template is not None:
        command.append(f"--chat-template={chat_template}")
    if names:
        command += ["--tool-parser", names[0]]
    _server = subprocess.Popen(command, pass_fds=fds)
    atexit.register(stop_text_gen_server)
    where = f"{host} port {server_port}" if sock is None else sock.getsockname()
    logger.info("The HTTP server is process %d, at %s.", _server.pid, where)


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
