"""`ChatFormat`: a chat as the text that its model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_async.errors import ConfigurationError
from megatron_async.server.fields.chat_request import ChatRequest, Message
from megatron_async.server.fields.refusal import Refusal
from megatron_async.serving.model_card import ModelCard
from megatron_async.text.tokenizer import Tokenizer, TokenizerError

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatFormat:
    """Renders chats by the model's own template, in a sandbox.

    Args:
        card: of the model.
        tokenizer: has the template; None: chats are refused.
        tool_parser: name of a tool format.
        template_bytes: most bytes of a chat.

    Raises:
        ConfigurationError: there is no such tool format.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer | None,
        tool_parser: str | None,
        template_bytes: int,
    ) -> None:
        if tool_parser is not None:
            raise ConfigurationError(
                f"tool_parser={tool_parser!r}: calls of tools are not served yet; leave it out."
            )
        self._card, self._tokenizer, self._most = card, tokenizer, template_bytes

    def render(self, request: ChatRequest) -> str:
        """The prompt of a chat.

        Raises:
            Refusal: the model has no template, or it rejects the messages; what is not served is
                named.
        """
        if self._tokenizer is None:
            raise Refusal("this model has no tokenizer here, so no chats: use /v1/completions.")
        for name in ("tools", "functions", "audio", "modalities", "chat_template",
                     "chat_template_kwargs", "documents", "mm_processor_kwargs",
                     "web_search_options"):  # fmt: skip
            if getattr(request, name):
                raise Refusal(f"{name} is not served: leave it out.", param=name)
        if request.continue_final_message:
            raise Refusal("continue_final_message is not served.", param="continue_final_message")
        messages = _plain(request.messages)
        size = sum(len(message["content"]) for message in messages)
        if size > self._most * 16:
            raise Refusal(f"the messages have {size} characters: send fewer.", param="messages")
        try:
            return self._tokenizer.apply_chat_template(
                messages, request.add_generation_prompt is not False
            )
        except TokenizerError as error:
            raise Refusal(str(error), param="messages") from error


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages with texts; parts of a content are joined."""
    if not messages:
        raise Refusal("messages is empty: give at least one.", param="messages")
    return [{"role": _role(message), "content": _text(message)} for message in messages]


def _role(message: Message) -> str:
    if message.role not in ROLES:
        raise Refusal(
            f"role={message.role[:50]!r} is not allowed: it must be one of {', '.join(ROLES)}.",
            param="messages",
        )
    return "system" if message.role == "developer" else message.role


def _text(message: Message) -> str:
    content: Any = message.content
    if message.tool_calls:
        raise Refusal("tool_calls in messages are not served.", param="messages")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = str(part.get("type"))[:50]
            raise Refusal(f"a part of type {kind!r} is not served: only text is.", param="messages")
    return "\n".join(texts)
