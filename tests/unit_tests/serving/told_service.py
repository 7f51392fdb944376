"""A dispatcher whose messages and time tests make up."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from megatron_async.serving.dispatcher import Dispatcher
from megatron_async.serving.messages import (
    PROTOCOL,
    Batch,
    Chunk,
    ClientHello,
    Completion,
    Ended,
    Generate,
    Message,
    Ping,
    Pong,
    ReplicaHello,
    ReplicaInfo,
    ReplicaStatus,
    Run,
    Started,
)
from megatron_async.serving.records import CoordinatorConfig

PARAMS = msgspec.Raw(msgspec.msgpack.encode({}))


def info(name: str, **changes: Any) -> ReplicaInfo:
    values = {"instance": name, "model": {"model": "tiny"}, "slots": 2, "kv_blocks": 100}
    return ReplicaInfo(name=name, **{**values, "block_size_tokens": 4, **changes})


def status(seen: int, tokens: int = 0, steps: int = 0, stopped: bool = False) -> ReplicaStatus:
    return ReplicaStatus(seen, tokens, 90, steps, stopped, {"steps": steps})


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

    def join(self, name: str, **changes: Any) -> list[Message]:
        self.hear(name, ReplicaHello(PROTOCOL, info(name, **changes)))
        return self.take(name)

    def lose(self, who: str) -> None:
        self.dispatcher.lost(who.encode(), "killed", self.now)

    def ask(self, number: int, **changes: Any) -> None:
        values = {"prompt": [1, 2, 3], "max_new_tokens": 10, "priority": 0, "stream": False}
        self.hear("client", Generate(number=number, params=PARAMS, **{**values, **changes}))

    def end(self, name: str, number: int) -> None:
        self.hear(name, Batch([Ended(number, Completion(generated_tokens=[7], replica=name))]))

    def say(self, name: str, number: int, tokens: list[int], text: str | None = None) -> None:
        self.hear(name, Batch([Chunk(number, tokens, text)]))

    def start(self, name: str, number: int) -> None:
        """A suspect has its first token."""
        self.hear(name, Batch([Started(number)]))

    def wait(self, seconds: float, alive: str = "") -> None:
        """Time goes by; who is alive answers."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.dispatcher.tick(self.now)
            for who in alive.split():
                self.hear(who, Pong() if who.startswith("client") else status(100))

    def take(self, who: str) -> list[Message]:
        return [m for m in self.sent.pop(who.encode(), []) if not isinstance(m, Ping)]

    def failure(self) -> tuple[str, str]:
        (ended,) = self.take("client")
        assert isinstance(ended, Ended)
        assert ended.completion.failure is not None
        return ended.completion.failure

    def runs(self, name: str) -> list[int]:
        return [m.number for m in self.take(name) if isinstance(m, Run)]
