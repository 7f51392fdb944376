"""Conversations: one or several, wrapped by the model's own template; what is none is refused."""

import json

import pytest

from megatron_async.checkpoints import open_model
from megatron_async.text.tokenizer import (
    Tokenizer,
    TokenizerError,
    conversation_tokens,
    conversations,
)

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_model("smollm2").tokenizer
    assert found is not None
    return found


def test_one_or_several() -> None:
    assert conversations(HELLO) == [HELLO]
    assert conversations([HELLO, HELLO]) == [HELLO, HELLO]
    assert conversations([]) == []
    for none in ("Hello", HELLO[0]):
        with pytest.raises(TokenizerError, match="no conversation"):
            conversations(none)  # type: ignore[arg-type]


def test_the_template_writes_all_marks(tokenizer: Tokenizer) -> None:
    tokens = conversation_tokens(tokenizer, HELLO)
    text = tokenizer.detokenize(tokens, skip_special_tokens=False)
    assert text == tokenizer.apply_chat_template(HELLO)
    assert text.endswith("<|im_start|>assistant\n")
    whole = conversation_tokens(tokenizer, HELLO, add_generation_prompt=False)
    assert len(whole) < len(tokens)
    assert tokens[: len(whole)] == whole


def test_tools_and_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    template = "{{ tools | tojson }}{{ mood }}{{ messages | length }}"
    own = Tokenizer(tokenizer.backend, tokenizer.config, (), template, tokenizer.source)
    told = own.apply_chat_template(HELLO, tools=[TOOL], variables={"mood": "calm"})
    assert json.loads(told.removesuffix("calm1")) == [TOOL]


def test_what_is_no_message_is_refused(tokenizer: Tokenizer) -> None:
    for message in ("Hello", {"content": "Hello"}, {"role": 1, "content": "Hello"}):
        with pytest.raises(TokenizerError, match="is no message: write one as"):
            conversation_tokens(tokenizer, [message])  # type: ignore[list-item]
    with pytest.raises(TokenizerError, match="no tokenizer"):
        conversation_tokens(None, HELLO)
