"""`TemplateRenderer`: chats as texts, within limits of time and memory.

A template is code from a download, and its time depends on the chat: loops over messages inside
loops over messages are common, and a template may look for a certain message (CVE-2025-61620 is one
that ran for ever). So no chat is rendered in this process. The way to the other one and back takes
some 20 microseconds at work, 150 from cold caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_async.server.chat.template_process import TemplateProcess
from megatron_async.server.fields.refusal import Refusal
from megatron_async.text.tokenizer import Tokenizer

LIMIT_S = 2.0
"""CPU time of one chat."""
SMALL_LIMIT_S = 0.5
"""CPU time of a small chat, which takes a hundredth of that."""
SMALL_MESSAGES = 64
"""Messages and tools of a small chat."""


class TemplateRenderer:
    """Renders the chats of one model; may be called on several threads, and on an event loop.

    Small chats have a process of their own, so that none of them waits for a large one.

    Args:
        tokenizer: has the template and the special tokens; None: chats are refused.
        small_bytes: JSON of a small chat.

    Attributes:
        small, large: the processes.
    """

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

        Args:
            variables: of the template, JSON values.

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
