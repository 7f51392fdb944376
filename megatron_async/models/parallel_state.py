"""Process groups, which every Megatron-Core module needs, also with a single process.

A gloo group listens at a TCP port, even if it has one rank, and Megatron-Core makes two dozen
groups. So a process that is alone has `LonelyGroup`s, without threads and ports.

A gloo pair takes the first process that connects to its port and says a small number
(`gloo/transport/tcp/listener.cc`), so another process of the host could take a rank's place while a
job starts: `check_peers`. Later connections are not taken.
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from megatron_async.communication.job import Job
from megatron_async.errors import ConfigurationError

import megatron_async.models.compile_later  # noqa: F401  # isort: skip  # before Megatron-Core
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.communication.bootstrap import bound_exit, join_job

# torch's stubs have overloads for callers; its C++ side calls a subclass with lists alone.
# mypy: disable-error-code="override, assignment, attr-defined, call-arg"


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
        """Always raises: there is nobody to send to."""
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


WORD_BYTES = 16


def check_peers(job: Job, groups: Iterable[dist.ProcessGroup]) -> None:
    """Let every two ranks of each group tell each other words that follow from a secret in the
    job's store. All ranks of the job call this, with the groups that they have, in the order in
    which they were made.

    Raises:
        ConfigurationError: a connection leads to another process.
        RankLost: a rank is gone.
    """
    secret = job.exchange("the secret of peers", secrets.token_hex(32))[0].encode()
    for group in groups:
        if group.size() == 1 or "gloo" not in dist.get_backend_config(group):
            continue
        ranks = dist.get_process_group_ranks(group)
        mine = torch.tensor([_word(secret, group, job.rank, rank) for rank in ranks])
        told = torch.zeros_like(mine)
        failure: RuntimeError | None = None
        try:
            dist.all_to_all_single(told, mine, group=group)
        except RuntimeError as error:
            job.watch.check(ranks, "the check of gloo's connections")
            failure = error
        expected = [_word(secret, group, rank, job.rank) for rank in ranks]
        words = told.tolist()  # sync-ok: at the start, on the host
        strangers = [rank for rank, word, due in zip(ranks, words, expected) if word != due]
        if strangers:
            raise ConfigurationError(
                f"A connection of rank {job.rank} by gloo does not lead to "
                f"{job.watch.describe(strangers)}: another process, of this host or of the "
                "network, has connected in its place. Start the job again, and see what else runs "
                "there (docs/ranks.md)."
            ) from failure


def _word(secret: bytes, group: dist.ProcessGroup, teller: int, hearer: int) -> list[int]:
    about = f"{group.group_name} {teller} {hearer}".encode()
    return list(blake2b(about, key=secret, digest_size=WORD_BYTES).digest())


COLLECTIVE_TIMEOUT_S = 60.0
"""Seconds that a collective of a step waits for a rank; a longer wait would never end."""


@dataclass(frozen=True)
class ParallelSizes:
    """Over how many ranks a model is split, by Megatron-Core's names (without "_size").

    Ranks count through the tensor-parallel group first, then the data-parallel, then the pipeline.
    Expert-parallel groups lie within data-parallel ones: attention is data-parallel inside them.

    Raises:
        ConfigurationError: a size is not an integer of at least 1.
    """

    tensor_model_parallel: int = 1
    pipeline_model_parallel: int = 1
    expert_model_parallel: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sequence_parallel":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{field.name}_size={value!r} must be an integer of at least 1."
                )

    @property
    def replica(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tensor_model_parallel * self.pipeline_model_parallel

    def data_parallel(self, world_size: int) -> int:
        """Replicas in a world of this size, which the sizes must divide."""
        tp, pp = self.tensor_model_parallel, self.pipeline_model_parallel
        replicas, rest = divmod(world_size, self.replica)
        if rest or not replicas:
            raise ConfigurationError(
                f"tensor_model_parallel_size={tp} and pipeline_model_parallel_size={pp} need a "
                f"multiple of {self.replica} processes, but this job has {world_size}: start it "
                f"with torchrun --nproc-per-node={self.replica} (or a multiple), or change the "
                "sizes."
            )
        if replicas % self.expert_model_parallel:
            raise ConfigurationError(
                f"expert_model_parallel_size={self.expert_model_parallel} does not divide the "
                f"{replicas} data-parallel replicas of this job: experts are spread over them, so "
                f"start a multiple of {self.replica * self.expert_model_parallel} processes."
            )
        return replicas


def world_size() -> int:
    """Processes of this job: torchrun's WORLD_SIZE, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def ensure_process_groups(sizes: ParallelSizes | None = None) -> ProcessGroupCollection:
    """Initialise torch.distributed and Megatron's groups if they are not, and return the groups.

    Under `torchrun` the environment has the rank of this process; alone, a world of one is made in
    memory (no port, no file). Groups that a user has set up before are used as they are.

    Args:
        sizes: of the groups; None: existing groups, or a size of 1 for all.

    Raises:
        ConfigurationError: the sizes do not fit the number of processes, or the groups that are
            there.
    """
    if sizes is not None:
        sizes.data_parallel(world_size())
    starts = not dist.is_initialized()
    if starts:
        job = join_job()
        job.route_collectives()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if job.world_size == 1:
            register_backend()
            backend = BACKEND
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("process_groups", job.store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        atexit.register(_leave, job)
    if not parallel_state.model_parallel_is_initialized():
        wanted = sizes or ParallelSizes()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=wanted.tensor_model_parallel,
            pipeline_model_parallel_size=wanted.pipeline_model_parallel,
            expert_model_parallel_size=wanted.expert_model_parallel,
            distributed_timeout_minutes=COLLECTIVE_TIMEOUT_S / 60,
            create_gloo_process_groups=False,
        )
        # Megatron's optimizers want groups for host tensors. The groups above take them, and each
        # gloo group would listen at a further port.
        for name in [name for name in vars(parallel_state) if name.endswith("_GLOO")]:
            setattr(parallel_state, name, getattr(parallel_state, name.removesuffix("_GLOO")))
    if starts:
        check_peers(join_job(), list(dist.distributed_c10d._world.pg_map))
    if sizes is not None:
        _check_groups(sizes)
    return ProcessGroupCollection.use_mpu_process_groups()


def _check_groups(sizes: ParallelSizes) -> None:
    found = {
        "tensor_model_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, size in found.items():
        if getattr(sizes, name) != size:
            raise ConfigurationError(
                f"{name}_size={getattr(sizes, name)}, but this process already has groups of "
                f"{size}: all models of a process share their groups. Use {size}, or another job."
            )


def _leave(job: Job) -> None:
    """Undo `ensure_process_groups` at exit, unless the user has."""
    # Gloo would wait for collectives with lost ranks, which can only be left behind.
    hangs = bool(job.watch.losses) and not torch.cuda.is_available()
    if dist.is_initialized() and not hangs:
        bound_exit(job)
        dist.destroy_process_group()
