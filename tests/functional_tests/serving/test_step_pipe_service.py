"""Tokens of a replica beside its coordinator: whichever way they take (the pipe, the Unix socket,
ZMQ), they come in the order of the steps, and all of them."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pytest

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.serving import token_emitter
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.host_socket import HostSocket
from megatron_async.serving.host_sockets import HostSockets
from megatron_async.serving.replica import Replica
from megatron_async.serving.step_pipe import StepPipe
from megatron_async.serving.step_pipes import StepPipes
from megatron_async.serving.token_client import TokenClient
from megatron_async.simulation.model_less import ModelLessEngine
from megatron_async.simulation.model_shape import ModelShape
from tests.support.patience import PATIENCE_S
from tests.support.token_reader import TokenReader

STREAMS, SHORTEST = 40, 60


class Numbers:
    """Every step's rows sample its number: tokens of a request that rise are in order."""

    def __init__(self) -> None:
        self.step = 0

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        self.step += 1
        return np.full(plan.num_rows, self.step, np.int32), np.ones(plan.num_rows, np.int32)


async def ask(address: str) -> None:
    """Requests of many lengths, which come by and by: first tokens and ends are between steps."""
    client = TokenClient(address)
    await client.open()
    await client.card()
    readers = []
    for number in range(STREAMS):
        length = SHORTEST + 3 * number
        readers.append((length, TokenReader()))
        params = SamplingParams(num_tokens_to_generate=length, termination_id=-1)
        client.send([1, 2, 3], params, readers[-1][1])
        await asyncio.sleep(0.001 * (number % 3))
    for length, reader in readers:
        end = await asyncio.wait_for(reader.end, PATIENCE_S)
        assert end.finish_reason == "length"
        steps = np.diff(reader.got)
        assert len(reader.got) == length
        assert (steps > 0).all(), reader.got
    await client.close()


@pytest.mark.parametrize(
    ("has_pipe", "has_socket"),
    [(True, True), (True, False), (False, True), (False, False)],
    ids=["pipe and socket", "pipe only", "socket only", "another host"],
)
def test_tokens_come_in_order(has_pipe: bool, has_socket: bool, monkeypatch: Any) -> None:
    """Break it: `StepPipes._read` takes steps that a message on its way must come before, or the
    coordinator does not ask `before_message`; `HostSocket.receive` does the former."""
    if sys.platform != "linux" and (has_pipe or has_socket):
        pytest.skip("abstract sockets are Linux'")
    written: list[bool] = []
    sent: list[bool] = []
    put, send = StepPipe.put, HostSocket.send

    def count(self: StepPipe, *args: Any) -> bool:
        written.append(put(self, *args))
        return written[-1]

    def count_sent(self: HostSocket, data: bytes) -> bool:
        """Now and then it is full."""
        sent.append(len(sent) % 7 != 3 and send(self, data))
        return sent[-1]

    monkeypatch.setattr(StepPipe, "put", count)
    monkeypatch.setattr(HostSocket, "send", count_sent)
    monkeypatch.setattr(token_emitter, "EVERY_S", 0.02)  # however slow this machine is now
    if not has_pipe:
        monkeypatch.setattr(StepPipes, "open", lambda *_: None)
    if not has_socket:
        monkeypatch.setattr(HostSockets, "open", lambda *_: False)
    coordinator = Coordinator("tcp://127.0.0.1:*")
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    shape = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
    config = InferenceConfig(
        max_requests=STREAMS, max_tokens=4 * STREAMS, max_sequence_length=512, num_kv_blocks=1000,
        block_size_tokens=16, enable_prefix_caching=False, lookahead=1,
    )  # fmt: skip

    async def main() -> None:
        engine = ModelLessEngine(shape, config, Numbers())
        replica = Replica(engine, coordinator.address, "none", "a")
        running = asyncio.create_task(replica.run())
        await asyncio.to_thread(asyncio.run, ask(coordinator.address))
        replica.leave()
        await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(main())
    coordinator.stop()
    thread.join(PATIENCE_S)
    assert any(written) == has_pipe
    assert any(sent) == has_socket
