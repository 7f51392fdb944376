"""`TemplateRenderer`: chats as texts, within a time limit.

A template is code from a download, and its time depends on the chat: loops over messages inside
loops over messages are common. So a chat is rendered in a process that has a limit (CVE-2025-61620
is a template that ran for ever). A template that was quick there renders small chats in this
process, where that takes some 50 microseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import jinja2
import msgspec

from megatron_async.server.fields.refusal import Refusal
from megatron_async.text.chat_template import compile_chat_template
from megatron_async.text.tokenizer import Tokenizer

COMMAND = [sys.executable, "-P", "-m", "megatron_async.server.chat.template_worker"]
LIMIT_S = 2.0
"""CPU time of one chat."""
QUICK_S = 0.005
"""A template that takes longer for a small chat is always rendered in the other process."""
QUICK_MESSAGES = 64
"""Messages and tools of a small chat: no loop over loops over them takes long."""


class TemplateRenderer:
    """Renders the chats of one model; may be called on several threads.

    Args:
        tokenizer: has the template and the special tokens; None: chats are refused.
        quick_bytes: JSON of a chat that may be rendered in this process.

    Attributes:
        limit_s: seconds of CPU time for a chat.
    """

    def __init__(self, tokenizer: Tokenizer | None, quick_bytes: int) -> None:
        self._source = None if tokenizer is None else tokenizer.chat_template
        self._special = {} if tokenizer is None else tokenizer.special_texts
        self._quick_bytes = quick_bytes
        self._is_quick = False
        """The template has shown that it is quick with small chats."""
        self._template: jinja2.Template | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None
        self._turn = threading.Lock()
        self.limit_s = LIMIT_S

    def prepare(self) -> None:
        """Start the process and render a first chat, which takes up to a second."""
        if self._source is not None:
            first = {"messages": [{"role": "user", "content": "Hello"}], "tools": None}
            try:
                self.render({**first, "add_generation_prompt": True})
            except Refusal:  # a template may want more than that
                return

    def render(self, variables: Mapping[str, Any]) -> str:
        """The chat as a text.

        Args:
            variables: of the template, JSON values.

        Raises:
            Refusal: the template rejects the chat, or it takes too long, or there is none.
        """
        if self._source is None:
            raise Refusal(
                "this model has no chat template: send prompts to /v1/completions.",
                param="messages",
            )
        is_small = (
            len(variables["messages"]) + len(variables.get("tools") or ()) <= QUICK_MESSAGES
            and len(msgspec.json.encode(variables)) <= self._quick_bytes
        )
        if is_small and self._is_quick:
            return self._render_here(variables)
        with self._turn:
            answer = self._ask(variables)
        if "error" in answer:
            raise _rejected(answer["error"])
        if is_small:
            self._is_quick = answer["cpu_s"] < QUICK_S
        return str(answer["text"])

    def close(self) -> None:
        """End the process, also in the middle of a chat."""
        if self._stop is not None:
            self._stop()

    def _render_here(self, variables: Mapping[str, Any]) -> str:
        if self._template is None:
            assert self._source is not None
            self._template = compile_chat_template(self._source)
        start = time.thread_time()
        try:
            return self._template.render(**(self._special | dict(variables)))
        except Exception as error:  # a template is code, it can raise anything
            raise _rejected(str(error)[:500] or type(error).__name__) from error
        finally:
            self._is_quick = time.thread_time() - start < QUICK_S

    def _ask(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        try:
            process.stdin.write(json.dumps([variables, self.limit_s]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has died of the chat
            pass
        if line:
            return dict(json.loads(line))
        status = process.wait()
        self._process = None
        raise Refusal(
            f"the model's chat template takes more than {self.limit_s:g} s of CPU time, or too "
            f"much memory, for this chat (status {status}): send fewer or shorter messages.",
            param="messages",
        )

    def _start(self) -> None:
        self.close()
        # In a session of its own, Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            start_new_session=True,
        )  # fmt: skip
        self._stop = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([self._source, self._special]) + "\n")
        self._process.stdin.flush()


def _rejected(why: str) -> Refusal:
    return Refusal(
        f"the model's chat template rejects the messages: {why}", param="messages",
        code="chat_template_error",
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was not sent cannot be any more
            continue
