"""`TemplateRenderer`: chats as texts, within limits of time and memory.

A template is code from a download, and its time depends on the chat: loops over messages inside
loops over messages are common, and a template may look for a certain message (CVE-2025-61620 is one
that ran for ever). So no chat is rendered in this process. The way to the other one and back takes
some 20 microseconds at work, 150 from cold caches.
"""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from megatron_async.server.fields.refusal import Refusal
from megatron_async.text.tokenizer import Tokenizer

COMMAND = [sys.executable, "-P", "-m", "megatron_async.server.chat.template_worker"]
PATIENCE_MS = 50
"""Milliseconds that an event loop waits for a chat, which is some 0.1 ms at work. A process that
took longer is ended, and no event loop waits for the next one."""


class TakesLong(Exception):
    """On an event loop: this may take long, so call it again on a thread."""


class TemplateProcess:
    """Owns one process, which is started for its first chat, and again after one that was too much
    for it. May be used by several threads, one of which may run an event loop. `template` is its
    first line: template and special tokens, as JSON. `limit_s`: seconds of CPU time for a chat."""

    def __init__(self, template: str, limit_s: float) -> None:
        self._template = template
        self.limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None
        self._turn = threading.Lock()
        self._has_been_slow = False

    def ask(self, variables: str) -> dict[str, Any] | None:
        """Render a chat.

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


LIMIT_S = 2.0
"""CPU time of one chat."""
SMALL_LIMIT_S = 0.5
"""CPU time of a small chat, which takes a hundredth of that."""
SMALL_MESSAGES = 64
"""Messages and tools of a small chat."""


class TemplateRenderer:
    """Renders the chats of one model; may be called on several threads, and on an event loop.

    Small chats have a process of their own, so that none of them waits for a large one.
    `small_bytes`: JSON of a small chat. Without a tokenizer chats are refused."""

    def __init__(self, tokenizer: Tokenizer | None, small_bytes: int) -> None:
        self._has_template = tokenizer is not None and tokenizer.chat_template is not None
        special = {} if tokenizer is None else tokenizer.special_texts
        template = json.dumps([None if tokenizer is None else tokenizer.chat_template, special])
        self._small_bytes = small_bytes
        self.small = TemplateProcess(template, SMALL_LIMIT_S)
        self.large = TemplateProcess(template, LIMIT_S)

    def prepare(self) -> None:
        """Start the process of small chats and render a first one, which takes up to a second."""
        if self._has_template:
            first = {"messages": [{"role": "user", "content": "Hello"}], "tools": None}
            try:
                self.render({**first, "add_generation_prompt": True})
            except Refusal:  # a template may want more than that
                return

    def render(self, variables: Mapping[str, Any]) -> str:
        """The chat as a text.

        Raises:
            Refusal: the template rejects the chat, or it takes too long, or there is none.
            TakesLong: on an event loop; see `TemplateProcess.ask`.
        """
        if not self._has_template:
            raise Refusal(
                "this model has no chat template: send prompts to /v1/completions.",
                param="messages",
            )
        text = json.dumps(variables)
        count = len(variables["messages"]) + len(variables.get("tools") or ())
        is_small = count <= SMALL_MESSAGES and len(text) <= self._small_bytes
        process = self.small if is_small else self.large
        answer = process.ask(text)
        if answer is None:
            raise Refusal(
                f"the model's chat template takes more than {process.limit_s:g} s of CPU time, or "
                "too much memory, for this chat: send fewer or shorter messages.",
                param="messages",
            )
        if "error" in answer:
            raise Refusal(
                f"the model's chat template rejects the messages: {answer['error']}",
                param="messages", code="chat_template_error",
            )  # fmt: skip
        return str(answer["text"])

    def close(self) -> None:
        """End the processes, also in the middle of a chat."""
        self.small.close()
        self.large.close()
