"""`LonelyGroup`: the process group of a process that is alone, without threads and ports.

A gloo group listens at a TCP port, even if it has one rank, and Megatron-Core makes two dozen
groups. With one rank every collective is a copy.
"""

# torch's stubs have overloads for callers; its C++ side calls a subclass with lists alone.
# mypy: disable-error-code="override, assignment, attr-defined, call-arg"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "lonely"
"""Name in torch.distributed."""

Work = dist.Work


class LonelyGroup(dist.ProcessGroup):
    """A group of one rank. Tensors may be on any device; copies are enqueued as others are.

    Methods have the names and arguments of torch's `ProcessGroup`, which calls them. Sending and
    receiving raise, because there is no other rank.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend, in torch's messages."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Name that torch has set. Its own property asks a C++ backend, of which there is none."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Sequence[Tensor], *_: Any) -> Work:
        """The sum of one is itself."""
        return _done(tensors)

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, *_: Any, **__: Any) -> Work:
        """Nobody is waited for."""
        return _done([])

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: Any
    ) -> Work:
        """Copy each input to the one place of its list."""
        return _copy([places[0] for places in outputs if places], inputs)

    gather = allgather

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *_: Any
    ) -> Work:
        """Copy the one input of each list."""
        return _copy(outputs, [parts[0] for parts in inputs if parts])

    scatter = reduce_scatter

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any) -> Work:
        """Copy each input."""
        return _copy(outputs, inputs)

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = alltoall

    def alltoall_base(self, output: Tensor, input: Tensor, *_: Any) -> Work:
        """Copy the input."""
        return _copy([output], [input])

    _allgather_base = _reduce_scatter_base = alltoall_base

    def send(self, *_: Any) -> Work:
        """There is nobody to send to.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this process is the only rank of its group: it has no peer.")

    recv = recv_anysource = send


def register_backend() -> None:
    """Let torch.distributed make `LonelyGroup` where it is asked for `BACKEND`."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])


def _make(_: dist.Store, rank: int, size: int, timeout: timedelta) -> LonelyGroup:
    if size != 1:
        raise RuntimeError(f"a group of {size} ranks cannot be {BACKEND!r}: use gloo or nccl.")
    return LonelyGroup()


def _copy(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
    for output, given in zip(outputs, inputs, strict=True):
        output.view(-1).copy_(given.reshape(-1))
    return _done(outputs)


def _done(value: Any) -> Work:
    future: Future[Any] = Future()
    future.set_result(list(value))
    return _create_work_from_future(future)
