"""Processes that run code of a checkout: their environment, their time, their output."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """For a process of a job of one rank, which writes nothing into the checkout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *([given] if given else [])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }


def run(command: list[str], env: dict[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """Run a command to its end, or to the end of its time.

    Args:
        command: and its arguments.
        env: its whole environment.
        folder: where it runs.
        timeout_s: it is killed then.

    Returns:
        its exit status, 124 if time was up, and what it wrote to both streams.
    """
    try:
        done = subprocess.run(
            command, env=env, cwd=folder, timeout=timeout_s, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout
