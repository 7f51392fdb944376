"""How tensors of another process come to a `WeightRound`: bytes, a process group, CUDA IPC.

What comes is plain data; nothing is unpickled or imported by its word. Give `WeightRound.check` the
names and shapes first: then no memory is made for what the model does not have.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from megatron_async.checkpoints import huggingface
from megatron_async.errors import UpdateError
from megatron_async.updates.writes import giving_way

DTYPES = {
    name: dtype
    for stored, dtype in huggingface.DTYPES.items()
    for name in (stored, str(dtype), str(dtype).removeprefix("torch."))
}
"""Dtypes by the names of safetensors and of torch."""
BACKENDS = ("nccl", "gloo")
POLL_S, MOST_POLL_S = 0.00005, 0.005
"""Seconds between two looks for a tensor, the first and the longest."""
_ABANDONED: list[Any] = []
"""Groups, and what was awaited in them: gloo's end with a wait for it, which holds Python up."""
GRACE_S = 600.0
"""NCCL's own watchdog ends the process; it is told so many seconds more than our limit."""
COUNTERS, COUNTERS_NAME, EVENT_BYTES = 10_000, b"/torch_", 64
"""Facts of torch's CUDA IPC: reference counters in a shared file, how the file's name begins, bytes
of an event's handle (`torch/csrc/CudaIPCTypes.h`, `StorageSharing.cpp`)."""


def tensors_of_bytes(items: Iterable[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in host memory of `[name, dtype, shape, bytes]`."""
    for name, dtype_name, shape, data in items:
        dtype, size = _dtype(name, dtype_name), _size(name, shape)
        if len(data) != size * dtype.itemsize:
            raise UpdateError(
                f"tensor {name!r} of shape {list(shape)} and {dtype} takes "
                f"{size * dtype.itemsize:,} bytes, and {len(data):,} came."
            )
        values = torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0)
        yield name, values.to(dtype).view(tuple(shape))


class TrainersGroup:
    """A torch process group of a trainer, its rank 0, and ranks of engines; see `open_group`."""

    def __init__(self, name: str, group: dist.ProcessGroup, time_limit_s: float) -> None:
        self.name, self._group, self._time_limit_s = name, group, time_limit_s

    def broadcast(self, tensor: Tensor, over: Event) -> None:
        """Fill a tensor with what the trainer sends.

        Raises:
            UpdateError: it did not come in time, or before `over`, or the trainer is gone.
        """
        try:
            work = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
            end, pause = time.monotonic() + self._time_limit_s, POLL_S
            while not work.is_completed():
                if over.is_set() or time.monotonic() > end:
                    self._group.abort()
                    _ABANDONED.append((self._group, work))
                    limit = f"nothing came for {self._time_limit_s:g} s"
                    raise RuntimeError("the round was dropped" if over.is_set() else limit)
                time.sleep(pause)
                pause = min(2 * pause, MOST_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise UpdateError(
                f"process group {self.name!r}: the trainer's tensor did not come ({error}). The "
                "group is lost: both sides make a new one."
            ) from error

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def open_group(
    name: str,
    backend: str,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    time_limit_s: float,
) -> TrainersGroup:
    """Join a trainer's group beside this process's own, as SGLang and NeMo-RL make theirs: the
    trainer is rank 0 and keeps the store at `host:port`.

    Raises:
        UpdateError: an unknown backend or rank, a name that is taken, or nobody came in time.
    """
    if backend not in BACKENDS or not 0 < rank < world_size:
        raise UpdateError(
            f"process group {name!r}: backend={backend!r} must be one of {', '.join(BACKENDS)} and "
            f"rank={rank} one of 1 to {world_size - 1}, the trainer being rank 0."
        )
    limit = timedelta(seconds=time_limit_s)
    longer = timedelta(seconds=time_limit_s + GRACE_S) if backend == "nccl" else limit
    address = f"[{host}]" if ":" in host else host
    try:
        store, *_ = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=limit))
        store.set_timeout(limit)
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=longer,
        )
    except (RuntimeError, ValueError) as error:
        raise UpdateError(
            f"process group {name!r} at {host}:{port}: cannot be joined as rank {rank} of "
            f"{world_size} ({str(error).splitlines()[0]})."
        ) from error
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return TrainersGroup(name, group, time_limit_s)


def receive(
    group: TrainersGroup,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    over: Event,
    packed: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a trainer broadcasts in this order; `packed`: as one message of bytes. Once
    `over` is set nothing is waited for, except in the first broadcast of an NCCL group: its call
    connects the ranks, and returns after the group's time limit at the latest.

    Raises:
        UpdateError: lists of different lengths, an unknown dtype, or nothing came.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise UpdateError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: give one of each "
            "for a tensor."
        )
    kinds = [_dtype(name, each) for name, each in zip(names, dtypes, strict=True)]
    sizes = [_size(name, shape) for name, shape in zip(names, shapes, strict=True)]
    if not packed:
        for name, dtype, shape in zip(names, kinds, shapes, strict=True):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
            group.broadcast(tensor, over)
            yield name, tensor
        return
    total = sum(size * dtype.itemsize for size, dtype in zip(sizes, kinds, strict=True))
    message = torch.empty(total, dtype=torch.uint8, device=device)
    group.broadcast(message, over)
    first = 0
    for name, dtype, size, shape in zip(names, kinds, sizes, shapes, strict=True):
        part = message[first : first + size * dtype.itemsize]
        first += len(part)
        # A view of another dtype has to begin at a multiple of its size.
        yield name, part.clone().view(dtype).view(tuple(shape))


def open_handles(handles: Mapping[str, Any], device: torch.device) -> list[tuple[str, Tensor]]:
    """Tensors on a GPU of another process of this host, by torch's CUDA IPC, without a copy.

    Args:
        handles: "memories", each `[GPU (number or UUID), handle, size and offset (bytes), handle
            and offset of the reference counter, event's handle, whether to wait for it]`, as
            `UntypedStorage._share_cuda_` gives them; "tensors", each `[name, dtype, shape, stride,
            number of its memory, offset]`, in elements.
        device: where the engine's steps run.

    Raises:
        UpdateError: no GPU here, a tensor outside of its memory, or the memory cannot be opened or
            is described as torch describes none.
    """
    if device.type != "cuda":
        raise UpdateError("CUDA IPC needs an engine on a GPU: send the tensors' bytes, or a group.")
    memories, opened, found = handles["memories"], dict[int, torch.UntypedStorage](), []
    for memory in memories:
        if not _is_memory(memory):
            raise UpdateError(
                f"{memory!r:.200} is no memory as torch shares it: send the 8 fields of "
                "UntypedStorage._share_cuda_."
            )
    for name, dtype_name, shape, stride, number, offset in giving_way(_chosen(handles, device)):
        dtype, size = _dtype(name, dtype_name), _size(name, shape)
        _size(name, (*stride, offset))
        if number not in opened:
            opened[number] = _open(memories[number])
        storage = opened[number]
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=False))
        is_outside = size and (last + 1) * dtype.itemsize > storage.nbytes()
        if len(shape) != len(stride) or is_outside:
            raise UpdateError(f"tensor {name!r} lies outside of its memory.")
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        found.append((name, empty.set_(storage, offset, tuple(shape), tuple(stride))))
    return found


def _chosen(handles: Mapping[str, Any], device: torch.device) -> Iterator[Sequence[Any]]:
    """The tensors to open. Trainers of several GPUs may tell each GPU's copy of a tensor, as vLLM's
    callers do: then it is this GPU's."""
    memories, copies = handles["memories"], defaultdict[str, list[Any]](list)
    for tensor in handles["tensors"]:
        name, number = tensor[0], tensor[4]
        _size(name, [number])
        if number >= len(memories):
            raise UpdateError(f"tensor {name!r} lies outside of its memory.")
        copies[name].append(tensor)
    for name, each in copies.items():
        gpus = {memories[tensor[4]][0] for tensor in each}
        here = [t for t in each if len(gpus) == 1 or _is_here(memories[t[4]][0], device)]
        if not here:
            raise UpdateError(
                f"tensor {name!r} lies on GPUs {gpus}, and this rank on none of them."
            )
        yield from here


def _open(memory: Sequence[Any]) -> torch.UntypedStorage:
    gpu, *fields = memory
    try:
        return torch.UntypedStorage._new_shared_cuda(_gpu(gpu), *fields)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UpdateError(
            f"memory of GPU {gpu!r} cannot be opened ({str(error).splitlines()[0]}): trainer and "
            "engine must run on one host and see this GPU."
        ) from error


def _is_memory(fields: Any) -> bool:
    """Whether a memory's fields are of torch's kind. Torch itself looks at their types alone: it
    reads a whole event's handle, and later counts down in a file, wherever the offset leads."""
    match fields:
        case [int() | str(), bytes(handle), int(size), int(offset), bytes(file), int(counter),
              bytes(event), bool()]:  # fmt: skip
            is_torchs = file.startswith(COUNTERS_NAME) and b"/" not in file[1:]
            is_inside = min(size, offset, counter) >= 0 and counter < COUNTERS
            return is_torchs and is_inside and bool(handle) and len(event) == EVENT_BYTES
    return False


def _is_here(gpu: int | str, device: torch.device) -> bool:
    if isinstance(gpu, int):
        return gpu == device.index
    return gpu.removeprefix("GPU-") == str(torch.cuda.get_device_properties(device).uuid)


def _gpu(which: int | str) -> int:
    """Number of a GPU in this process."""
    if isinstance(which, int):
        return which
    uuids = [
        str(torch.cuda.get_device_properties(each).uuid)
        for each in range(torch.cuda.device_count())
    ]
    return uuids.index(which.removeprefix("GPU-"))


def _dtype(name: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UpdateError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _size(name: str, shape: Sequence[int]) -> int:
    if not all(isinstance(each, int) and 0 <= each < 2**40 for each in shape):
        raise UpdateError(f"tensor {name!r}: shape {list(shape)!r:.200} is none.")
    return math.prod(shape)
