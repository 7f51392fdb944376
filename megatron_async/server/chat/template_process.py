"""`TemplateProcess`: a process that renders chats, with limits of time and memory."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import threading
import weakref
from typing import Any

COMMAND = [sys.executable, "-P", "-m", "megatron_async.server.chat.template_worker"]
PATIENCE_MS = 50
"""Milliseconds that an event loop waits for a chat, which is some 0.1 ms at work. A process that
took longer is ended, and no event loop waits for the next one."""


class TakesLong(Exception):
    """On an event loop: this may take long, so call it again on a thread."""


class TemplateProcess:
    """Owns one process, which is started for its first chat, and again after one that was too much
    for it. May be used by several threads, one of which may run an event loop.

    Args:
        template: first line of the process: template and special tokens, as JSON.
        limit_s: seconds of CPU time for a chat.
    """

    def __init__(self, template: str, limit_s: float) -> None:
        self._template = template
        self.limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None
        self._turn = threading.Lock()
        self._has_been_slow = False

    def ask(self, variables: str) -> dict[str, Any] | None:
        """Render a chat.

        Args:
            variables: of the template, as JSON.

        Returns:
            `text`, or `error`; None if the process died of it, or was ended meanwhile.

        Raises:
            TakesLong: on an event loop, if the answer does not come at once.
        """
        on_loop = _is_on_loop()
        if on_loop and (self._has_been_slow or not self._is_running()):
            raise TakesLong
        if not self._turn.acquire(blocking=not on_loop):
            raise TakesLong
        try:
            return self._ask(f"[{variables}, {self.limit_s}]\n".encode(), on_loop)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process, also in the middle of a chat."""
        if self._stop is not None:
            self._stop()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ask(self, line: bytes, on_loop: bool) -> dict[str, Any] | None:
        if not self._is_running():
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            process.stdin.write(line)
            process.stdin.flush()
            if on_loop:
                soon = select.poll()
                soon.register(process.stdout, select.POLLIN)
                if not soon.poll(PATIENCE_MS):
                    self._has_been_slow = True
                    self.close()
                    raise TakesLong
            answer = process.stdout.readline()
        except (OSError, ValueError):  # it has died of the chat, or was closed
            pass
        if answer:
            return dict(json.loads(answer))
        process.wait()
        return None

    def _start(self) -> None:
        self.close()
        # In a session of its own, Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._stop = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(self._template.encode() + b"\n")
        self._process.stdin.flush()


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was not sent cannot be any more
            continue
