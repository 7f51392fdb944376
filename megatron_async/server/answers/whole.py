"""`WholeAnswer`: an answer as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_async.server.answers.choice_text import (
    ChoiceText,
    End,
    finish_reason,
    piece_reader,
    pieces_of,
)
from megatron_async.server.answers.log_prob_json import (
    LogProbs,
    Place,
    of_chat,
    of_completion,
    of_prompt,
    places,
)
from megatron_async.server.answers.prompt_places import prompt_places
from megatron_async.server.answers.stream import call_id, prompt_text
from megatron_async.server.answers.usage import UsageCount
from megatron_async.server.chat.answer_pieces import CallBegin, Content, Thought
from megatron_async.server.fields.asked import Asked, AskedChoice
from megatron_async.server.fields.served_model import ServedModel


class WholeAnswer:
    """The answer to one HTTP request that is not streamed.

    Args:
        asked: the request.
        served: the model.

    Attributes:
        collectors: of the choices, in the order of `asked.choices`.
    """

    def __init__(self, asked: Asked, served: ServedModel) -> None:
        self.asked = asked
        self.served = served
        self.collectors = [Collector(asked, choice, served) for choice in asked.choices]

    @property
    def is_over(self) -> bool:
        """Whether all choices have ended."""
        return all(collector.ended is not None for collector in self.collectors)

    @property
    def has_failed(self) -> bool:
        """Whether a choice has failed: the others need not be waited for."""
        return any(one.ended is not None and one.ended.failure for one in self.collectors)


class Collector:
    """One choice of a `WholeAnswer`.

    Args:
        asked: the request.
        choice: of it.
        served: the model.

    Attributes:
        ended: how it ended; None before.
        tokens: that were generated.
    """

    def __init__(self, asked: Asked, choice: AskedChoice, served: ServedModel) -> None:
        self._asked = asked
        self._served = served
        self.choice = choice
        self._maker = ChoiceText(asked, choice, served)
        self._texts: list[str] = []
        self._log_probs: list[tuple[list[int], LogProbs]] = []
        self.tokens: list[int] = []
        self.ended: End | None = None

    def push(
        self,
        tokens: Sequence[int],
        log_probs: LogProbs | None = None,
        text: str | None = None,
    ) -> None:
        """Take tokens; the arguments are those of `StreamFormatter.push`."""
        ids = list(tokens)
        self.tokens += ids
        if log_probs is not None:
            self._log_probs.append((ids, log_probs))
        self._texts.append(self._maker.push(ids, text))

    def end(self, end: End) -> None:
        """Take the end."""
        self.ended = end
        if end.failure is None:
            self._texts.append(self._maker.end(end))

    def choice_object(self) -> dict[str, Any]:
        """The choice as JSON values. It must have ended."""
        end, style = self.ended, self._asked.style
        assert end is not None
        text = "".join(self._texts)
        if style.endpoint == "chat":
            found = self._chat(text, end)
        else:
            found = self._completion(text, end)
        found["stop_reason"] = self._maker.stop_reason(end)
        if style.gives_token_ids:
            found["token_ids"] = [] if style.is_scoring else self.tokens
            prompt = self._asked.prompts[self.choice.prompt]
            found["prompt_token_ids"] = None if isinstance(prompt, str) else list(prompt)
        return found

    def prompt_log_probs(self) -> list[dict[str, dict[str, Any]] | None] | None:
        """VLLM's `prompt_logprobs` of the choice's prompt; None if they were not asked for."""
        assert self.ended is not None
        top_n = self._asked.style.prompt_top_n
        if top_n is None:
            return None
        found = prompt_places(self._asked, self.choice, self.ended, top_n)
        prompt = self._asked.prompts[self.choice.prompt]
        ids = [] if isinstance(prompt, str) else prompt
        return of_prompt(ids, found[1:], self._served.names_of_tokens)

    def _places(self) -> list[Place]:
        top_n = self._asked.style.top_n or 0
        return [place for ids, one in self._log_probs for place in places(ids, one, top_n)]

    def _completion(self, text: str, end: End) -> dict[str, Any]:
        style, names = self._asked.style, self._served.names_of_tokens
        if style.is_scoring:
            text = prompt_text(self._asked.prompts[self.choice.prompt], self._served)
        log_probs = None
        if style.top_n is not None:
            found = prompt_places(self._asked, self.choice, end, style.top_n) if style.echo else []
            found += [] if style.is_scoring else self._places()
            log_probs, _ = of_completion(found, names, style.names_by_id)
        choice = {
            "index": self.choice.index,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": finish_reason(end, style.chat, False),
        }
        # Not asked for, null: clients of vLLM read the field of every choice.
        choice["prompt_logprobs"] = self.prompt_log_probs()
        return choice

    def _chat(self, text: str, end: End) -> dict[str, Any]:
        style, names = self._asked.style, self._served.names_of_tokens
        chat = style.chat
        content, thoughts = "", ""
        calls: list[dict[str, Any]] = []
        for piece in pieces_of(piece_reader(chat), text, is_end=True):
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Thought):
                thoughts += piece.text
            elif isinstance(piece, CallBegin):
                function = {"name": piece.name, "arguments": ""}
                calls.append({"id": call_id(), "type": "function", "function": function})
            else:
                calls[-1]["function"]["arguments"] += piece.text
        if not chat.many_calls:
            calls = calls[:1]
        content = chat.prefix + content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not (calls or thoughts) else None,
            "refusal": None,
        }
        if thoughts and chat.gives_thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        log_probs = None
        if style.top_n is not None:
            told = of_chat(self._places(), names, style.names_by_id)
            log_probs = {"content": told, "refusal": None}
        return {
            "index": self.choice.index,
            "message": message,
            "logprobs": log_probs,
            "finish_reason": finish_reason(end, chat, bool(calls)),
        }


def whole(answer: WholeAnswer) -> bytes:
    """The answer as JSON text.

    Args:
        answer: all of whose choices have ended, or one has failed.

    Raises:
        Refusal: a choice has failed; so has the answer.
    """
    asked = answer.asked
    style = asked.style
    usage = UsageCount(len(asked.prompts))
    for collector in answer.collectors:
        end = collector.ended
        if end is None:
            continue
        if end.failure is not None:
            raise style.refusal(*end.failure)
        usage.set_prompt(collector.choice.prompt, end.num_prompt_tokens, end.num_cached_tokens or 0)
        usage.generated += 0 if style.is_scoring else len(collector.tokens)
    is_chat = style.endpoint == "chat"
    body: dict[str, Any] = {
        "id": style.id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": style.created,
        "model": style.model,
        "choices": [collector.choice_object() for collector in answer.collectors],
        "usage": usage.usage(),
    }
    if is_chat:
        body["prompt_logprobs"] = answer.collectors[0].prompt_log_probs()
    return msgspec.json.encode(body)
