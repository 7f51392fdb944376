"""Tensors of another process: bytes, a gloo group of two processes; hostile fields are refused."""

import os
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_async.errors import UpdateError
from megatron_async.updates.transports import open_group, open_handles, receive, tensors_of_bytes
from tests.support.ranks import free_port, run_ranks

CPU = torch.device("cpu")
NAMES, DTYPES, SHAPES = ["a", "b", "c"], ["bfloat16", "F32", "torch.float16"], [[3, 5], [], [2, 0]]


def sent() -> list[torch.Tensor]:
    torch.manual_seed(3)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    return [torch.randn(shape).to(each) for shape, each in zip(SHAPES, dtypes, strict=True)]


def trainer_and_engine(port: int) -> list[str]:
    """Rank 0 is a trainer that makes its group as SGLang's callers do; what rank 1 finds wrong."""
    name, tensors = "weights", sent()
    if int(os.environ["RANK"]) == 0:
        limit = timedelta(seconds=60)
        store, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
        group, _ = c10d._new_process_group_helper(
            2, 0, [], dist.Backend("gloo"), dist.PrefixStore(name, store),
            group_name=c10d.GroupName(name), timeout=limit,
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=group)
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        dist.broadcast(torch.cat(parts), src=0, group=group)
        return []
    group = open_group(name, "gloo", "127.0.0.1", port, 1, 2, time_limit_s=60)
    wrong = []
    for packed in (False, True):
        found = list(receive(group, NAMES, DTYPES, SHAPES, CPU, Event(), packed))
        if [each for each, _ in found] != NAMES:
            wrong.append("names")
        for (_, ours), theirs in zip(found, tensors, strict=True):
            if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                wrong.append(f"{packed}: {ours} for {theirs}")
    try:
        list(receive(group, NAMES, DTYPES, SHAPES, CPU, Event()))
        wrong.append("a trainer that is gone has sent something")
    except UpdateError as error:
        if "did not come" not in str(error):
            wrong.append(str(error))
    group.close()
    return wrong


def test_a_trainers_gloo_group() -> None:
    assert run_ranks(2, trainer_and_engine, free_port()) == [[], []]


def test_bytes() -> None:
    tensors = sent()
    data = [each.reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors]
    items = list(zip(NAMES, DTYPES, SHAPES, data, strict=True))
    for (name, found), expected in zip(tensors_of_bytes(items), tensors, strict=True):
        assert name in NAMES
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("a", "F32", [2], b"1234567"), "takes 8 bytes, and 7 came"),
        (("a", "F8_E4M3", [2], b"12"), "dtype 'F8_E4M3' is not one of"),
        (("a", "os.system", [2], b"12"), "dtype 'os.system' is not one of"),
        (("a", "F32", [-1], b""), r"shape \[-1\] is none"),
        (("a", "F32", [2**50], b""), "is none"),
        (("a", "F32", ["x"], b""), "is none"),
    ],
)
def test_hostile_bytes(item: Any, message: str) -> None:
    with pytest.raises(UpdateError, match=message):
        list(tensors_of_bytes([item]))


def test_hostile_groups_and_handles() -> None:
    for backend, rank in (("mpi", 1), ("gloo", 0), ("gloo", 2)):
        with pytest.raises(UpdateError, match="must be one of nccl, gloo and"):
            open_group("g", backend, "127.0.0.1", 1, rank, 2, 1)
    with pytest.raises(UpdateError, match="cannot be joined as rank 1 of 2"):
        open_group("g", "gloo", "127.0.0.1", free_port(), 1, 2, 0.1)
    with pytest.raises(UpdateError, match="2 names, 3 dtypes and 3 shapes"):
        list(receive(None, NAMES[:2], DTYPES, SHAPES, CPU, Event()))  # type: ignore[arg-type]
    with pytest.raises(UpdateError, match="CUDA IPC needs an engine on a GPU"):
        open_handles({"memories": [], "tensors": []}, CPU)
    cuda = torch.device("cuda")
    with pytest.raises(UpdateError, match="outside of its memory"):
        open_handles({"memories": [], "tensors": [["a", "F32", [2], [1], 0, 0]]}, cuda)


MEMORY = [0, b"h" * 66, 4096, 0, b"/torch_1_2_3", 7, b"e" * 64, True]


@pytest.mark.parametrize(
    "other",
    [
        {1: b""}, {1: "h" * 66}, {2: -1}, {3: -512}, {4: b"/passwords"}, {4: b"/torch_/../x"},
        {4: None}, {5: -1}, {5: 10_000}, {5: 2**40}, {6: b"e" * 63}, {7: 1}, {0: b"0"},
    ],
)  # fmt: skip
def test_hostile_memories_are_not_opened(other: dict[int, Any], monkeypatch) -> None:
    """With the counter's place of a sender torch would write anywhere."""
    opened: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *a: opened.append(a))
    cuda = torch.device("cuda")
    fields = [other.get(number, field) for number, field in enumerate(MEMORY)]
    for memory in (fields, MEMORY[:7], [*MEMORY, True], "x", None):
        with pytest.raises(UpdateError, match="no memory as torch shares it"):
            open_handles({"memories": [memory], "tensors": []}, cuda)
    assert not opened


def test_of_several_gpus_copies_this_ones_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of two GPUs sends them once for all ranks; memory here stands for a GPU's."""
    values = torch.arange(8, dtype=torch.float32)
    opened: list[Any] = []

    def open_memory(*fields: Any) -> Any:
        opened.append(fields)
        return values.untyped_storage()

    def properties(device: Any) -> Any:
        return SimpleNamespace(uuid=f"uuid-{torch.device(device).index}")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for kind in (int, "GPU-uuid-{}".format):
        opened.clear()
        memories = [[kind(gpu), *MEMORY[1:]] for gpu in (0, 1, 1)]
        tensors = [["a", "F32", [2], [1], 0, 0], ["a", "F32", [2], [1], 1, 4],
                   ["b", "F32", [1], [1], 2, 7]]  # fmt: skip
        sent = {"memories": memories, "tensors": tensors}
        found = open_handles(sent, torch.device("cuda", 1))
        assert [(name, tensor.tolist()) for name, tensor in found] == [("a", [4, 5]), ("b", [7])]
        assert [fields[0] for fields in opened] == [1, 1]
        found = open_handles(sent, torch.device("cuda", 0))
        assert [(name, tensor.tolist()) for name, tensor in found] == [("a", [0, 1]), ("b", [7])]
        with pytest.raises(UpdateError, match=r"'a' lies on GPUs .* this rank on none"):
            open_handles(sent, torch.device("cuda", 2))
    twice = {"memories": [MEMORY], "tensors": [["a", "F32", [2], [1], 0, 0]] * 2}
    assert len(open_handles(twice, torch.device("cuda", 1))) == 2, "which the round refuses"
