"""A chat of one person with a model: messages, what of them fits, answers as they are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async.llm import LLM
    from megatron_async.requests.inference_request import DynamicInferenceRequest
    from megatron_async.requests.sampling_params import SamplingParams

LEAST_ANSWER = 64
"""Tokens that must fit after a prompt, or the oldest turns are left out."""


class TurnDoesNotFit(ValueError):
    """A message that is too long for the context, even without the turns before it."""


@dataclass(frozen=True)
class Answer:
    """What became of a turn.

    Attributes:
        text: of the answer, as far as it was made.
        end: why it ended: a `finish_reason`, or "stopped" by Ctrl-C.
        prompt_tokens: tokens of the conversation, the answer not counted.
        cached_tokens: of these, tokens that were computed in an earlier turn.
        tokens: of the answer.
        first_s: seconds until its first token.
        seconds: until its end.
        left_out: messages that did not fit in the context any more.
    """

    text: str
    end: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_s: float
    seconds: float
    left_out: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, after the first."""
        return max(self.tokens - 1, 0) / max(self.seconds - self.first_s, 1e-9)


class ChatSession:
    """The conversation with one model.

    Args:
        llm: the model, on one rank.
        sampling: of each answer.
        system: the system message, or None.

    Attributes:
        messages: as the model's template takes them; they may be changed between two turns.
        context_tokens: most tokens of a conversation.

    Raises:
        TokenizerError: the model has no chat template.
    """

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._runner = asyncio.Runner()
        self.messages: list[dict[str, str]] = []
        self.context_tokens = llm.engine.context.max_sequence_length
        self.begin(system)
        self._tokens([*self.messages, {"role": "user", "content": "Hello"}])

    def begin(self, system: str | None) -> None:
        """Forget the conversation; the next one has this system message."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str, show: Callable[[str], None]) -> Answer:
        """The model's answer to the next message of the user. Both join `messages`.

        Ctrl-C stops the answer; what there is of it stays in the conversation.

        Args:
            text: the message.
            show: called with each piece of the answer's text, as soon as it is certain.

        Raises:
            TurnDoesNotFit: the message is too long; `messages` are as before.
            Exception: the request failed; `messages` are as before.
        """
        messages, left_out, prompt = self._fit([*self.messages, {"role": "user", "content": text}])
        answer = self._runner.run(self._answer(prompt, left_out, show))
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def close(self) -> None:
        """End the event loop of the answers."""
        self._runner.close()

    def _tokens(self, messages: list[dict[str, str]]) -> list[int]:
        from megatron_async.text.tokenizer import conversation_tokens

        return conversation_tokens(self._llm.tokenizer, messages)

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], int, list[int]]:
        """Messages without the oldest turns, if those leave no room for an answer; how many were
        left out; and the prompt."""
        most = self.context_tokens - min(LEAST_ANSWER, self.context_tokens // 2)
        first = 1 if messages[0]["role"] == "system" else 0
        left_out = 0
        while len(prompt := self._tokens(messages)) > most:
            if len(messages) <= first + 1:
                raise TurnDoesNotFit(
                    f"the message comes to {len(prompt)} tokens with the template's, and the "
                    f"context has {self.context_tokens}, of which {self.context_tokens - most} are "
                    "for the answer: shorten the message, or begin with --max-sequence-length N."
                )
            # A question and its answer, so that what is left begins with a question.
            messages = [*messages[:first], *messages[first + 2 :]]
            left_out += 2
        return messages, left_out, prompt

    async def _answer(
        self, prompt: list[int], left_out: int, show: Callable[[str], None]
    ) -> Answer:
        engine = self._llm.engine
        before = engine.stats()
        began, first_s, parts, stopped = time.monotonic(), 0.0, [], False
        running = asyncio.create_task(engine.run_engine())
        number = engine.requests.free_id()
        ended = engine.add_request(number, prompt, self._sampling)
        try:
            if not ended.done():  # or it was refused
                async for chunk in engine.stream(number):
                    if not first_s:
                        first_s = time.monotonic() - began
                    if chunk.text:
                        parts.append(chunk.text)
                        show(chunk.text)
        except asyncio.CancelledError:  # Ctrl-C
            if not ended.done():
                engine.abort_request(number)
            stopped = True
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        request: DynamicInferenceRequest = ended.result()
        if request.error is not None and not stopped:
            raise request.error
        after = engine.stats()
        return Answer(
            text="".join(parts),
            end="stopped" if stopped else str(request.finish_reason),
            prompt_tokens=len(prompt),
            cached_tokens=int(after["prefix_cache_hits"] - before["prefix_cache_hits"]),
            tokens=len(request.generated_tokens),
            first_s=first_s,
            seconds=time.monotonic() - began,
            left_out=left_out,
        )
