"""`ServedModel`: what the server knows of the model that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from megatron_async.errors import RequestError
from megatron_async.requests.defaults import (
    PLAIN_SAMPLES,
    GenerationDefaults,
    generation_defaults,
)
from megatron_async.server.answers.token_names import SpecialTokensView, TokenNames
from megatron_async.server.chat.chat_format import ChatFormat
from megatron_async.server.chat.thoughts import CLOSE, OPEN
from megatron_async.server.fields.json_body import Limits
from megatron_async.server.fields.refusal import Refusal
from megatron_async.serving.model_card import ModelCard
from megatron_async.text.tokenizer import Tokenizer

LONGEST_TOKEN = 16
"""Characters that are reckoned for a token at least, where the vocabulary has none so long."""
CPU_ANSWER_TOKENS = 1024
"""A minute or so of a small model on a CPU; to the end of its context it might take ten."""
SHOWN = 100
"""Characters of a name that a message quotes."""


@dataclass(frozen=True)
class ServedModel:
    """A model with what prompts and answers are made by; made once in an API process.
    `names_of_tokens` is for log probs, `longest_token` in characters.

    Attributes:
        names: that requests may use; answers use the one that was used.
        tokenizer: None where there is none, or only the replica has it.
        as_megatron: requests mean what they mean at Megatron-Core's server: every name is this
            model's, top_p 0 is off, a chat's prompt has a BOS token where `add_BOS` says so; and
            answers tell what Megatron's do.
    """

    card: ModelCard
    names: tuple[str, ...]
    limits: Limits
    tokenizer: Tokenizer | None
    names_of_tokens: TokenNames
    chat: ChatFormat
    longest_token: int
    as_megatron: bool = False

    @classmethod
    def of(
        cls,
        card: ModelCard,
        names: Sequence[str] = (),
        limits: Limits | None = None,
        tool_parser: str | None = None,
        chat_template: str | None = None,
        as_megatron: bool = False,
        reasoning_parser: str | None = None,
    ) -> ServedModel:
        """Read the card; takes as long as reading its tokenizer (up to a second). `chat_template`
        stands for the card's.

        Raises:
            TokenizerError: its tokenizer cannot be read.
            ConfigurationError: there is no such tool format.
        """
        if chat_template is not None:
            card = msgspec.structs.replace(card, chat_template=chat_template)
        tokenizer = card.tokenizer()
        longest = LONGEST_TOKEN
        if tokenizer is not None:
            longest = max(longest, max(map(len, tokenizer.backend.get_vocab()), default=0))
        limits = limits or Limits()
        chat = ChatFormat(card, tokenizer, tool_parser, limits.template_bytes, reasoning_parser)
        if as_megatron and reasoning_parser is None:
            chat.thoughts = bool(chat.marks)  # others are part of the content
        return cls(
            card,
            tuple(names) or (card.model,),
            limits,
            tokenizer,
            TokenNames(tokenizer),
            chat,
            longest,
            as_megatron,
        )

    @cached_property
    def defaults(self) -> GenerationDefaults:
        """What a request that says nothing is answered with: as the model says; at Megatron's
        server a temperature of 1."""
        if self.as_megatron:
            return GenerationDefaults({"temperature": PLAIN_SAMPLES})
        return generation_defaults(self.card)

    @cached_property
    def text_with_special(self) -> SpecialTokensView | None:
        """A tokenizer that keeps special tokens in texts."""
        return None if self.tokenizer is None else SpecialTokensView(self.tokenizer)

    @cached_property
    def text_with_calls(self) -> Tokenizer | SpecialTokensView | None:
        """A tokenizer that keeps the special tokens of the tool format and of thoughts in texts."""
        if self.tokenizer is None:
            return None
        return SpecialTokensView(self.tokenizer, [*self.chat.special, OPEN, CLOSE])

    @cached_property
    def text_with_channels(self) -> tuple[SpecialTokensView, SpecialTokensView]:
        """Tokenizers whose texts have the marks of harmony: without other special tokens, and with
        them."""
        assert self.tokenizer is not None, "its tokens were found"
        marks = self.chat.marks
        hidden, shown = (SpecialTokensView(self.tokenizer, kept, marks) for kept in ((), None))
        return hidden, shown

    @cached_property
    def answer_tokens(self) -> int | None:
        """Most tokens of a chat's answer whose request gives no limit: the model's own
        `max_new_tokens` or the server's limit, whichever is less. Without both: on a CPU
        `CPU_ANSWER_TOKENS`, else None, which is as many as fit, as at OpenAI and vLLM."""
        named = [self.defaults.max_new_tokens, self.limits.answer_tokens]
        found = [number for number in named if number is not None]
        if not found:
            return CPU_ANSWER_TOKENS if self.card.device == "cpu" else None
        return min(found)

    def name(self, asked: str | None) -> str:
        """The name for the answer; 404 where the model is not served."""
        if asked is None or (self.as_megatron and asked not in self.names):
            return self.names[0]
        if asked not in self.names:
            raise Refusal(
                f"The model {asked[:SHOWN]!r} does not exist; this server has "
                f"{', '.join(map(repr, self.names))}.",
                404, "model", "model_not_found",
            )  # fmt: skip
        return asked

    def tokenize(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text; a text that is too long by far is not tokenized."""
        if self.tokenizer is None:
            raise Refusal(
                "this server has no tokenizer for a text: send the prompt's token ids to "
                "/v1/completions.", param=param,
            )  # fmt: skip
        most = self.card.max_sequence_length * self.longest_token
        if len(text) > most:
            raise self.too_long(f"the prompt has {len(text)} characters", param)
        try:
            return self.tokenizer.tokenize(text, add_special_tokens)
        except RequestError as error:
            raise Refusal(str(error), param=param) from error

    def too_long(self, what: str, param: str) -> Refusal:
        """The refusal of a prompt beyond the model's context."""
        return Refusal(
            # Clients read these words: of Anthropic's servers, of vLLM's and of Megatron's.
            f"prompt is too long: {what}. This model's maximum context length was exceeded. Its "
            f"{self.card.max_sequence_length} tokens must hold the prompt and at least one "
            "generated token: shorten it.",
            param=param, code="context_length_exceeded",
        )  # fmt: skip
