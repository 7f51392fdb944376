"""Tokens of a replica beside its coordinator: those that go by the pipe and those that do not come
in the order of the steps, and all of them."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pytest
from token_reader import TokenReader

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.serving import token_emitter
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.replica import Replica
from megatron_async.serving.step_pipe import StepPipe
from megatron_async.serving.step_pipes import StepPipes
from megatron_async.serving.token_client import TokenClient
from megatron_async.simulation.model_less import ModelLessEngine
from megatron_async.simulation.model_shape import ModelShape

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
        end = await asyncio.wait_for(reader.end, 60)
        assert end.finish_reason == "length"
        steps = np.diff(reader.got)
        assert len(reader.got) == length
        assert (steps > 0).all(), reader.got
    await client.close()


@pytest.mark.parametrize("is_near", [True, False], ids=["with the pipe", "another host"])
def test_tokens_come_in_order(is_near: bool, monkeypatch: Any) -> None:
    """Break it: `StepPipes._read` takes steps that a message on its way must come before, or the
    coordinator does not ask `before_message`."""
    if is_near and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux'")
    written: list[bool] = []
    put = StepPipe.put

    def count(self: StepPipe, *args: Any) -> bool:
        written.append(put(self, *args))
        return written[-1]

    monkeypatch.setattr(StepPipe, "put", count)
    monkeypatch.setattr(token_emitter, "EVERY_S", 0.02)  # however slow this machine is now
    if not is_near:
        monkeypatch.setattr(StepPipes, "open", lambda *_: None)
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
        await asyncio.wait_for(running, 20)

    asyncio.run(main())
    coordinator.stop()
    thread.join(5)
    assert any(written) == is_near
