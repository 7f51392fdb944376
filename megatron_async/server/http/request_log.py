"""A line of log for each request that asks for an answer or commands the service.

It has no word of a prompt or an answer, and what it quotes of a request are ids of few characters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.fields.asked import Asked
from megatron_async.server.fields.refusal import Refusal

logger = logging.getLogger("megatron_async")


class RequestNote:
    """What is known of one request, for its line.

    Attributes:
        status: of the answer; 0: none was begun, because the client went away.
    """

    def __init__(self, path: str, own_id: bytes) -> None:
        self._path, self._own_id = path, own_id.decode("ascii")
        self._begun_ns = time.time_ns()
        self._asked: Asked | None = None
        self._feeds: Sequence[ChoiceFeed] = ()
        self.status, self.owner = 0, ""
        self.refusal: Refusal | None = None

    def sent(self, asked: Asked, feeds: Sequence[ChoiceFeed]) -> None:
        """Note that it was sent to the engine."""
        self._asked, self._feeds = asked, feeds

    def write(self) -> None:
        """Write the line; the request is answered or given up."""
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.text())

    def text(self) -> str:
        """The line."""
        status = str(self.status) if self.status else "no answer"
        told = [f"{self._path} {status}", f"id {self._own_id}"]
        if self.owner:
            told.append(f"key {self.owner}")
        if self.refusal is not None:
            why = self.refusal.param or self.refusal.code
            told.append(f"refused{f' ({why})' if why else ''}")
        elif self._asked is not None:
            told += self._of_answer(self._asked)
        told.append(f"{self._seconds(time.time_ns()):.3f} s")
        return ", ".join(told)

    def _of_answer(self, asked: Asked) -> list[str]:
        ends = [feed.end for feed in self._feeds]
        # Of a text that a replica tokenizes, its end has the number.
        given = enumerate(asked.prompts)
        prompts = {place: len(one) for place, one in given if not isinstance(one, str)}
        for choice, end in zip(asked.choices, ends, strict=True):
            if end is not None:
                prompts[choice.prompt] = end.num_prompt_tokens
        generated = sum(feed.num_tokens for feed in self._feeds)
        told = [asked.style.id, f"{sum(prompts.values())} tokens in", f"{generated} out"]
        if first := min((feed.first_ns for feed in self._feeds if feed.first_ns), default=0):
            told.append(f"first after {self._seconds(first):.3f} s")
        reasons = {"client gone" if end is None else end.finish_reason or "error" for end in ends}
        return [*told, f"end {' '.join(sorted(reasons))}"]

    def _seconds(self, now_ns: int) -> float:
        return max(now_ns - self._begun_ns, 0) / 1e9
