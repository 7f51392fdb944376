"""`StandIn`: the processes around a replica once more, kept as busy by a mock replica, so that what
they cost an engine's thread (shared cores, caches, hyperthreads) can be taken off."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
from child_processes import SPAWN, Pipe, coordinate, spawn
from server_peers import MockReplica, Served

from megatron_async.serving.messages import StepTokens, encode
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.token_emitter import EVERY_S


def say_joined_steps(
    address: str, streams: int, step_s: float, is_on: Synchronized[int], pipe: Pipe
) -> None:
    """A mock replica: while it is on, a message of all steps of `EVERY_S`, as the coordinator makes
    them of the emitter's."""
    card = ModelCard(model="none", max_sequence_length=10**6, vocab_size=8, block_size_tokens=4)
    replica = MockReplica(address, streams, Served(card.encode(), []))
    numbers: list[int] = []
    while len(numbers) < streams:
        number = replica.heard(100)
        numbers += [] if number is None else [number]
    steps = round(EVERY_S / step_s)
    counts, tokens = np.full(streams, steps, np.int32), np.full(steps * streams, 7, np.int32)
    message = encode(
        StepTokens(np.array(numbers, np.int64).tobytes(), counts.tobytes(), tokens.tobytes())
    )
    pipe.send("ready")
    due = time.perf_counter()
    while not pipe.poll():
        if is_on.value:
            replica.send_encoded(message)
        replica.heard(0)
        due = max(due + EVERY_S, time.perf_counter())
        time.sleep(max(due - time.perf_counter(), 0.0))


class StandIn:
    """A coordinator, clients and a mock replica; use it with `with`.

    Args:
        ask: a client's process, called with the coordinator's address, its number of requests and
            a pipe.
        clients: how many.
        each: requests of a client.
        step_s: seconds of a step.
    """

    def __init__(self, ask: Callable[..., None], clients: int, each: int, step_s: float) -> None:
        self._is_on: Any = SPAWN.Value("i", 0, lock=False)
        coordinator, told = spawn(coordinate)
        address = told.recv()[0]
        self._readers = readers = [spawn(ask, address, each) for _ in range(clients)]
        replica, self._pipe = spawn(say_joined_steps, address, each * clients, step_s, self._is_on)
        self._processes = [replica, *(process for process, _ in readers), coordinator]
        self._pipe.recv()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def turn(self, on: bool) -> None:
        """Be busy, or idle; takes no time."""
        self._is_on.value = int(on)
