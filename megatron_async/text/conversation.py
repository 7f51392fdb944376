"""Conversations as token ids, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.text.tokenizer import Tokenizer, TokenizerError

type Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with "role" ("system", "user", "assistant" or "tool") and "content"."""

RAW_CHAT = (
    "generate() goes on from a text as it is, and this model was trained on chats: "
    "llm.chat([{'role': 'user', 'content': ...}]) asks it by its chat template."
)
"""What is said once of an LLM that is given such prompts."""


def is_raw_chat(tokenizer: Tokenizer | None, prompts: Sequence[Any]) -> bool:
    """Whether a prompt is a text without any mark of the model's chat template: poor answers.

    Args:
        tokenizer: of the model.
        prompts: texts, or token ids, which are nobody's mistake.
    """
    if getattr(tokenizer, "chat_template", None) is None or tokenizer is None:
        return False
    # A prompt of a template that was rendered before has its special tokens in the text.
    marks = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return any(not any(mark in text for mark in marks) for text in texts)


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation, or several, as a list of conversations.

    Raises:
        TokenizerError: `messages` is neither.
    """
    if isinstance(messages, str | Mapping):
        raise TokenizerError(
            f"messages={messages!r} is no conversation: give a list of messages such as "
            '[{"role": "user", "content": "Hello"}], or a list of such lists.'
        )
    found: list[Any] = list(messages)
    return [found] if found and isinstance(found[0], Mapping) else found


def conversation_tokens(
    tokenizer: Tokenizer | None,
    messages: Conversation,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tokenizer: of the model; None has no template.
        messages: the conversation.
        tools: functions that the model may call, as OpenAI writes them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        variables: further variables of the template.

    Raises:
        TokenizerError: there is no tokenizer, no template, or the template rejects the messages.
    """
    if tokenizer is None:
        raise TokenizerError(
            "this model has no tokenizer, and so no chat template: give its prompts as token ids."
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(
                f"{message!r} is no message: write one as "
                '{"role": "user", "content": "Hello"}; roles are system, user, assistant and tool.'
            )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt, tools, variables)
    # The template writes the special tokens itself.
    return tokenizer.tokenize(text, add_special_tokens=False)
