"""`torch_pickle`: what torch's multiprocessing writes of a GPU's tensors is read as data, and
nothing else is. No GPU is needed: a class stands for the tensor, which pickles as torch's does."""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_async.server.rl import torch_pickle
from megatron_async.server.rl.torch_pickle import (
    CudaMemory,
    NotData,
    SentTensor,
    read_handles,
    read_named_tensors,
)

HANDLE, COUNTER, EVENT = b"h" * 64, b"/torch_1_2_3", b"e" * 64
BUCKETS = "sglang.srt.weight_sync.tensor_bucket"


class OnGpu:
    """Pickles as a tensor of a GPU does (`reduce_tensor`); `arguments` are those of
    `rebuild_cuda_tensor`."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return rebuild_cuda_tensor, self.arguments


def arguments(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    offset: int = 0,
    size: int = 4096,
    **other: Any,
) -> tuple[Any, ...]:
    """Arguments of a contiguous tensor at the begin of `size` bytes."""
    fields = {
        "cls": torch.Tensor, "shape": shape,
        "stride": tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), "offset": offset,
        "storage": torch.storage.UntypedStorage, "dtype": dtype, "device": 3, "handle": HANDLE,
        "size": size, "place": 512, "grad": False, "counter": COUNTER, "counter_place": 7,
        "event": EVENT, "waits": True,
    }  # fmt: skip
    return tuple((fields | other).values())


def dumped(value: Any, protocol: int | None = None) -> bytes:
    """Pickle as SGLang's `MultiprocessingSerializer` does."""
    file = io.BytesIO()
    ForkingPickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.fixture
def part_of_bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's class of the places in a flattened tensor, under its own name."""

    @dataclass
    class FlattenedTensorMetadata:
        name: str
        shape: torch.Size
        dtype: torch.dtype
        start_idx: int
        end_idx: int
        numel: int

    FlattenedTensorMetadata.__module__ = BUCKETS
    FlattenedTensorMetadata.__qualname__ = "FlattenedTensorMetadata"
    module = ModuleType(BUCKETS)
    module.FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, BUCKETS, module)
    for end in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, end, ModuleType(end))
    return FlattenedTensorMetadata


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_tensor_is_the_arguments_that_rebuild_it(protocol: int) -> None:
    sent = [
        ("a", OnGpu(*arguments(torch.Size([2, 3]), offset=5))),
        ("b", OnGpu(*arguments((), torch.int8))),
    ]
    if protocol == 2:  # which has bytes only as a call of a function: handles need a later one
        with pytest.raises(NotData, match=r"_codecs\.encode"):
            read_named_tensors(dumped(sent, protocol), False)
        return
    memory = CudaMemory(3, HANDLE, 4096, 512, COUNTER, 7, EVENT, True)
    assert read_named_tensors(dumped(sent, protocol), False) == [
        ("a", SentTensor("BF16", (2, 3), (3, 1), memory, 5)),
        ("b", SentTensor("I8", (), (), memory, 0)),
    ]


def test_sglangs_own_rebuild_function_names_the_gpu_by_its_uuid() -> None:
    data = dumped([("a", OnGpu(*arguments((4,), device="GPU-8a3f")))])
    name = b"torch.multiprocessing.reductions\x94\x8c\x13rebuild_cuda_tensor"
    other = b"sglang.srt.utils.patch_torch\x94\x8c\x1d_rebuild_cuda_tensor_modified"
    assert name in data
    body = data[11:].replace(b"\x8c\x20" + name, b"\x8c\x1c" + other)
    found = read_named_tensors(b"\x80\x04" + body, False)
    assert found[0][1].memory.device == "GPU-8a3f"


def test_the_parts_of_a_bucket(part_of_bucket: Any) -> None:
    whole = OnGpu(*arguments((100,), torch.uint8, size=100))
    parts = [
        part_of_bucket("a", torch.Size([2, 4]), torch.float32, 0, 32, 32),
        part_of_bucket("b", torch.Size([3]), torch.bfloat16, 32, 38, 6),
    ]
    sent = dumped({"flattened_tensor": whole, "metadata": parts})
    found = read_named_tensors(sent, True)
    assert [(name, *tensor[:3], tensor.offset) for name, tensor in found] == [
        ("a", "F32", (2, 4), (4, 1), 0),
        ("b", "BF16", (3,), (1,), 16),
    ]
    with pytest.raises(NotData, match="no list"):
        read_named_tensors(sent, False)
    for wrong in (
        part_of_bucket("a", torch.Size([2, 4]), torch.float32, 0, 31, 31),
        part_of_bucket("a", torch.Size([2, 4]), torch.float32, 80, 112, 32),
        part_of_bucket("a", torch.Size([2, 4]), "F33", 0, 32, 32),
        part_of_bucket("a", torch.Size([2, 4]), torch.float32, 2, 34, 32),
        part_of_bucket("a", [-2, -4], torch.float32, 0, 32, 32),
        ("a", 1, 2),
    ):
        with pytest.raises(NotData):
            read_named_tensors(dumped({"flattened_tensor": whole, "metadata": [wrong]}), True)
    none = OnGpu(*arguments((0,), torch.uint8, size=0, handle=None, counter=None, event=None))
    assert not read_named_tensors(dumped({"flattened_tensor": none, "metadata": []}), True)


def test_vllms_handles_are_checked_beside_what_is_said() -> None:
    pair = (rebuild_cuda_tensor, arguments((2, 3)))
    sent = pickle.dumps([{"GPU-1": pair, "GPU-2": pair}])
    found = read_handles(sent, ["a"], ["bfloat16"], [[2, 3]])
    assert [(name, tensor.memory.device) for name, tensor in found] == [
        ("a", "GPU-1"), ("a", "GPU-2"),
    ]  # fmt: skip
    for dtypes, shapes in ((["float16"], [[2, 3]]), (["bfloat16"], [[3, 2]]), (["torch"], [[1]])):
        with pytest.raises(NotData, match="dtype"):
            read_handles(sent, ["a"], dtypes, shapes)
    with pytest.raises(NotData, match="an entry for each"):
        read_handles(sent, ["a", "b"], ["bfloat16"], [[2, 3]])
    many = {f"GPU-{number}": pair for number in range(torch_pickle.MOST_GPUS + 1)}
    for by_gpu in (many, {"G" * 100: pair}, [pair]):
        with pytest.raises(NotData, match=r"GPUs|device"):
            read_handles(pickle.dumps([by_gpu]), ["a"], ["bfloat16"], [[2, 3]])
    with pytest.raises(NotData, match="no tensor"):
        read_handles(pickle.dumps([{"GPU-1": (torch.Size, ([1],))}]), ["a"], ["int8"], [[1]])


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 10}, {"offset": 2043}, {"shape": [-1]}, {"shape": (2**49,)}, {"stride": (1, 1)},
        {"dtype": torch.complex64}, {"dtype": "none"}, {"handle": "text"}, {"event": b"e" * 300},
        {"device": 1.5}, {"device": "G" * 100}, {"handle": None}, {"shape": (1,) * 9},
        {"device": 2**70},
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(NotData):
        read_named_tensors(dumped([("a", OnGpu(*arguments(**{"shape": (6,), **wrong})))]), False)


class Danger:
    """Makes a file where it is loaded."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.given = function, given

    def __reduce__(self) -> Any:
        return self.given


def test_nothing_else_is_made_called_or_imported(tmp_path: Any) -> None:
    ran = tmp_path / "ran"
    for danger, named in (
        (Danger(os.system, f"touch {ran}"), "posix.system"),
        (Danger(eval, f"open({str(ran)!r}, 'w')"), "builtins.eval"),
        (Danger(getattr, "text", "load"), "builtins.getattr"),
        (torch.ones(3), "torch.multiprocessing.reductions.rebuild_tensor"),
        (Danger(torch.load, str(ran)), "torch.serialization.load"),
        ({1, 2}, "NotData|holds more than data"),
        ({("a",) * 2: 1}, "keys are no texts"),
        ({1: 2, 3: 4}, "keys are no texts"),
    ):
        with pytest.raises(NotData, match=named):
            read_named_tensors(dumped([("a", danger)]), False)
    unimported = b"\x80\x04\x8c\x08antigrav\x8c\x03ity\x93."
    with pytest.raises(NotData, match=r"antigrav\.ity"):
        read_named_tensors(unimported, False)
    assert not ran.exists()


def test_a_pickle_changes_nothing_that_the_next_one_meets() -> None:
    good = dumped([("a", OnGpu(*arguments((4,))))])
    rebuild = b"\x8c\x20torch.multiprocessing.reductions\x8c\x13rebuild_cuda_tensor\x93"
    part = b"\x8c\x24" + BUCKETS.encode() + b"\x8c\x17FlattenedTensorMetadata\x93"
    state = b"}\x8c\x05_calls\x8c\x04evilsb"
    for target in (rebuild, part, b"\x8c\x05torch\x8c\x04int8\x93", part + b")\x81"):
        for data in (target + state + b".", target + b"N" + state[:-1] + b"\x86b."):
            try:
                read_named_tensors(b"\x80\x04" + data, False)
            except NotData:
                continue
            raise AssertionError(data)
    assert read_named_tensors(good, False)


def test_the_largest_pickle_has_few_enough_instructions() -> None:
    """Tensors of all experts of a large model at once, with their names."""
    tensors = [(f"model.layers.{n}.x", OnGpu(*arguments((4,)))) for n in range(4096)]
    data = dumped(tensors)
    count = sum(1 for _ in pickletools.genops(data))
    assert count * 9 < torch_pickle.MOST_INSTRUCTIONS
    assert len(read_named_tensors(data, False)) == 4096


def test_damaged_and_huge_bytes_end_soon() -> None:
    good = dumped([("a", OnGpu(*arguments((4,))))])
    for end in range(0, len(good) - 1, 7):
        with pytest.raises(NotData):
            read_named_tensors(good[:end], False)
    for data in (
        b"\x80\x04B\xff\xff\xff\xff.",  # bytes of 4 GiB that are not there
        b"\x80\x04Nr\xff\xff\xff\xff.",  # place 2**32 - 1 among what is remembered
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",
        b"\x80\xff.", b"cos\nsystem\n.", b"(S'a'\ni__main__\nx\n.", b"",
    ):  # fmt: skip
        with pytest.raises(NotData):
            read_named_tensors(data, False)
    for much in (("n" * 1025, OnGpu(*arguments((4,)))),), (("a", 1),) * (2**16 + 1):
        with pytest.raises(NotData, match="no list"):  # one name, remembered, is many bytes
            read_named_tensors(dumped(list(much)), False)
    for repeated, most in ((b"(", 100), (b")", 20_000), (b"N\x94", 20_000), (b"Na", 2 << 20)):
        data = b"\x80\x04]" + repeated * most + b"."  # marks, values, and instructions
        with pytest.raises(NotData, match="open containers: send fewer"):
            read_named_tensors(data, False)
    with pytest.raises(NotData, match="send fewer"):
        read_named_tensors(b"N" * (torch_pickle.MOST_BYTES + 1), False)
