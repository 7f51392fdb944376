"""Tokens of a replica beside its coordinator, and far from it: they come in the order of the steps,
and all of them, however little the sockets take at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pytest

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.serving import connection, token_emitter
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.link import Link
from megatron_async.serving.replica import Replica
from megatron_async.serving.token_client import TokenClient
from tests.support.patience import PATIENCE_S
from tests.support.token_reader import KeepingReader

STREAMS, SHORTEST = 40, 60


class Numbers:
    """Every step's rows sample its number: tokens of a request that rise are in order."""

    def __init__(self) -> None:
        self.step = 0

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        self.step += 1
        return np.full(plan.num_rows, self.step, np.int32), np.ones(plan.num_rows, np.int32)


async def ask(address: str, secret: bytes | None, connected: list[bool]) -> None:
    """Requests of many lengths, which come by and by: first tokens and ends are between steps."""
    client = TokenClient(address, secret=secret)
    await client.open()
    await client.card()
    connected.append(True)
    readers = []
    for number in range(STREAMS):
        length = SHORTEST + 3 * number
        readers.append((length, KeepingReader()))
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
    ("is_here", "secret"),
    [(True, None), (False, None), (False, b"0123456789abcdef")],
    ids=["one host", "two hosts", "two hosts, encrypted"],
)
def test_tokens_come_in_order(is_here: bool, secret: bytes | None, monkeypatch: Any) -> None:
    """Break it: `Link._put` writes although something waits, or `flush` forgets what is left of a
    message that was written in part."""
    if sys.platform != "linux" and is_here:
        pytest.skip("abstract sockets are Linux'")
    taken: list[int] = []
    connected: list[bool] = []
    write = Link._write

    def write_in_part(self: Link, data: bytes | memoryview) -> int:
        """Now and then the socket is full, or takes a part."""
        most = (len(data), 5, len(data), 0, 1)[len(taken) % 5] if connected else len(data)
        taken.append(write(self, data[:most]) if most else 0)
        return taken[-1]

    monkeypatch.setattr(Link, "_write", write_in_part)
    if not is_here:
        monkeypatch.setattr(connection, "connect_here", lambda _: None)
    monkeypatch.setattr(token_emitter, "EVERY_S", 0.02)  # however slow this machine is now
    coordinator = Coordinator("tcp://127.0.0.1:*", secret=secret)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    shape = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
    config = InferenceConfig(
        max_requests=STREAMS, max_tokens=4 * STREAMS, max_sequence_length=512, num_kv_blocks=1000,
        block_size_tokens=16, enable_prefix_caching=False, lookahead=1,
    )  # fmt: skip

    peers: list[list[bool]] = []

    async def main() -> None:
        engine = ModelLessEngine(shape, config, Numbers())
        replica = Replica(engine, coordinator.address, "none", "a", secret=secret)
        running = asyncio.create_task(replica.run())
        await asyncio.to_thread(asyncio.run, ask(coordinator.address, secret, connected))
        peers.append([peer.is_here for peer in coordinator._peers.values()])
        replica.leave()
        await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(main())
    coordinator.stop()
    thread.join(PATIENCE_S)
    assert {here for each in peers for here in each} == {is_here}
