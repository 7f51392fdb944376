"""Weights of a trainer's process come to a replica that serves: through a process group (gloo, and
NCCL from another GPU), and by CUDA IPC, in the pickle that SGLang's callers send."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing  # which teaches ForkingPickler tensors
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_async import LLM
from megatron_async.checkpoints.source import named_tensors
from megatron_async.server.rl.family import _plain
from megatron_async.server.rl.torch_pickle import read_named_tensors
from megatron_async.serving.replica_weights import ReplicaWeights
from megatron_async.serving.weight_sources import TRAINERS_VARIABLE
from tests.support.harness import greedy
from tests.support.ranks import free_port, run_ranks
from tests.support.serving_processes import ENGINE

GROUP, LIMIT = "trainers", timedelta(seconds=60)
WAYS = [
    "gloo",
    pytest.param("nccl", marks=pytest.mark.gpus(2)),
    pytest.param("ipc", marks=pytest.mark.gpu),
]


def trained(known: list[list[Any]], round_: int, device: torch.device) -> dict[str, Tensor]:
    """Weights of names, shapes and dtypes; the same in both processes."""
    chance = torch.Generator().manual_seed(round_)
    return {
        name: torch.randn(shape, generator=chance).to(device, getattr(torch, dtype))
        for name, shape, dtype in known
    }


def trainer(store: dist.TCPStore, way: str, port: int) -> None:
    """Rank 0, which keeps both stores."""
    device = torch.device("cpu" if way == "gloo" else f"cuda:{int(way == 'nccl')}")
    known = json.loads(store.get("known"))
    if way == "ipc":
        torch.cuda.set_device(device)
        tensors = trained(known, 0, device)
        for round_ in range(2):
            for name, tensor in trained(known, round_, device).items():
                tensors[name].copy_(tensor)
            store.set(f"handles {round_}", bytes(ForkingPickler.dumps(list(tensors.items()))))
            store.get(f"done {round_}")  # and only now the tensors change
        return
    meeting, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=LIMIT))
    group, _ = c10d._new_process_group_helper(
        2, 0, [], dist.Backend(way), dist.PrefixStore(GROUP, meeting),
        group_name=c10d.GroupName(GROUP), timeout=LIMIT,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    for round_ in range(2):
        for tensor in trained(known, round_, device).values():
            dist.broadcast(tensor, group=group, group_src=0)
        store.get(f"done {round_}")


async def replica(store: dist.TCPStore, way: str, port: int, llm: LLM) -> list[Any]:
    """Rank 1: what each round has left."""
    engine, weights = llm.engine, ReplicaWeights(llm.engine)
    model = engine.controller.inference_wrapped_model.model
    live = named_tensors(model)
    known = [[n, [*t.shape], str(t.dtype).removeprefix("torch.")] for n, t in live.items()]
    store.set("known", json.dumps(known))

    async def told(what: str, **fields: Any) -> None:
        _, failure = await weights.do(f"weights_{what}", fields)
        assert failure is None, failure

    running = asyncio.create_task(engine.run_engine())
    long = engine.add_request(0, [1, 2, 3], greedy(400))
    if way != "ipc":
        address = f"127.0.0.1:{port}"
        await told("group", name=GROUP, address=address, rank_offset=1, world_size=2, backend=way)
    staging, found = "direct" if way == "ipc" else "auto", list[Any]()
    for round_ in range(2):
        fields = {"number": round_ + 1, "version": round_, "names": "megatron", "staging": staging}
        await told("begin", round="k", **fields)
        if way == "ipc":
            handles = read_named_tensors(store.get(f"handles {round_}"), is_flattened=False)
            await told("load", round="k", handles=[_plain(handles)])
        else:
            names, shapes, dtypes = map(list, zip(*known, strict=True))
            sent = {"name": GROUP, "names": names, "dtypes": dtypes, "shapes": shapes}
            await told("load", round="k", group=sent)
        await told("finish", round="k")
        await told("commit", weights={"number": round_ + 1, "version": round_}, policy="keep")
        store.set(f"done {round_}", "")
        expected = trained(known, round_, engine.context.device.torch_device)
        same = [torch.equal(live[name], tensor) for name, tensor in expected.items()]
        request = await engine.add_request(round_ + 1, [5, 6], greedy(4))
        found.append([all(same), request.weight_versions])
    assert len((await long).generated_tokens) == 400
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return found


def run(way: str, ports: list[int]) -> list[Any]:
    """One of the two processes, of which the engine is a job of its own."""
    rank = int(os.environ.pop("RANK"))
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    store = dist.TCPStore("127.0.0.1", ports[0], 2, rank == 0, LIMIT)
    if rank == 0:
        trainer(store, way, ports[1])
        return []
    os.environ[TRAINERS_VARIABLE] = "127.0.0.1"
    device = "cpu" if way == "gloo" else "cuda:0"
    with LLM("dummy:tiny", **{**ENGINE, "device": device}) as llm:
        return asyncio.run(replica(store, way, ports[1], llm))


@pytest.mark.parametrize("way", WAYS)
def test_each_round_is_whole_and_serving_goes_on(way: str) -> None:
    _, found = run_ranks(2, run, way, [free_port(), free_port()], timeout_s=200)
    assert found == [[True, [(version, 0, 4)]] for version in range(2)]
