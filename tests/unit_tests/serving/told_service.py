"""A dispatcher whose messages and time tests make up."""

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

from megatron_async.serving.dispatcher import Dispatcher
from megatron_async.serving.messages import (
    PROTOCOL,
    ClientHello,
    Ended,
    Generate,
    Message,
    Ping,
    Pong,
    ReplicaHello,
    ReplicaInfo,
    ReplicaStatus,
    Run,
    StepTokens,
    Weights,
)
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.step_arrays import StepArrays

PARAMS = msgspec.Raw(msgspec.msgpack.encode({}))


def info(name: str, **changes: Any) -> ReplicaInfo:
    values = {"instance": name, "model": {"model": "tiny"}, "slots": 2, "kv_blocks": 100}
    return ReplicaInfo(name=name, **{**values, "block_size_tokens": 4, **changes})


def status(seen: int, tokens: int = 0, steps: int = 0, stopped: bool = False) -> ReplicaStatus:
    return ReplicaStatus(seen, tokens, 90, steps, stopped, {"steps": steps})


def tokens_of(rows: dict[int, list[int]]) -> StepTokens:
    """A step that yields these tokens of these requests."""
    return StepTokens(
        np.array([*rows], np.int64).tobytes(),
        np.array([len(tokens) for tokens in rows.values()], np.int32).tobytes(),
        np.array([token for tokens in rows.values() for token in tokens], np.int32).tobytes(),
    )


def rows_of(message: StepTokens) -> list[tuple[int, list[int]]]:
    """Requests and tokens of a message."""
    step = StepArrays.of(message)
    parts = np.split(step.tokens, np.cumsum(step.counts)[:-1])
    return [
        (number, part.tolist())
        for number, part in zip(step.numbers.tolist(), parts, strict=len(step.counts) > 0)
    ]


class Service:
    """A dispatcher, and all that it sent."""

    def __init__(self, *replicas: str, **config: Any) -> None:
        self.sent: dict[bytes, list[Message]] = defaultdict(list)
        self.now = 0.0
        self.dispatcher = Dispatcher(
            CoordinatorConfig(**config), lambda who, message: self.sent[who].append(message), 0.0
        )
        self.hear("client", ClientHello(PROTOCOL))
        for name in replicas:
            self.join(name)
        self.sent.clear()

    def hear(self, who: str, message: Any) -> None:
        self.dispatcher.hear(who.encode(), message, self.now)

    def join(self, name: str, weights: Weights | None = None, **changes: Any) -> list[Message]:
        self.hear(name, ReplicaHello(PROTOCOL, info(name, **changes), weights or Weights()))
        return self.take(name)

    def lose(self, who: str) -> None:
        self.dispatcher.lost(who.encode(), "killed", self.now)

    def ask(self, number: int, **changes: Any) -> None:
        values = {"prompt": [1, 2, 3], "max_new_tokens": 10, "priority": 0}
        self.hear("client", Generate(number=number, params=PARAMS, **{**values, **changes}))

    def end(self, name: str, number: int) -> None:
        ended = Ended(number, "length", num_generated_tokens=1, replica=name)
        self.hear(name, StepTokens(ends=[ended]))

    def say(self, name: str, number: int, tokens: list[int], text: str = "") -> None:
        """A request has tokens, and perhaps text that the replica has made."""
        step = tokens_of({number: tokens})
        step.texts = [(number, text)] if text else []
        self.hear(name, step)

    def start(self, name: str, number: int) -> None:
        """A request has its first token."""
        self.say(name, number, [7])

    def wait(self, seconds: float, alive: str = "") -> None:
        """Time goes by; peers that are alive answer."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.dispatcher.tick(self.now)
            for who in alive.split():
                self.hear(who, Pong() if who.startswith("client") else status(100))

    def take(self, who: str) -> list[Message]:
        return [m for m in self.sent.pop(who.encode(), []) if not isinstance(m, Ping)]

    def failure(self) -> tuple[str, str]:
        (ended,) = self.ends("client")
        assert ended.failure is not None
        return ended.failure

    def ends(self, who: str) -> list[Ended]:
        """Ends that a client was told; what else it was told is passed over."""
        told = [m for m in self.take(who) if isinstance(m, StepTokens)]
        return [ended for step in told for ended in step.ends]

    def tokens(self, who: str) -> list[tuple[int, list[int]]]:
        """Tokens that a client was told, in order; all else is passed over."""
        return [row for m in self.take(who) if isinstance(m, StepTokens) for row in rows_of(m)]

    def runs(self, name: str) -> list[int]:
        return [m.number for m in self.take(name) if isinstance(m, Run)]
