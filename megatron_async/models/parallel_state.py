"""Process groups, which every Megatron-Core module needs, also with a single process."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist

import megatron_async.models.compile_later  # noqa: F401  # isort: skip  # before Megatron-Core
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.communication.bootstrap import bound_exit, join_job
from megatron_async.communication.job import Job
from megatron_async.errors import ConfigurationError
from megatron_async.models.lonely_group import BACKEND, register_backend
from megatron_async.models.peer_check import check_peers

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
        """Replicas in a world of this size.

        Raises:
            ConfigurationError: the sizes do not divide it.
        """
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


def agree_on_least(value: int) -> int:
    """The least of a number over all ranks that launch their steps together: the ranks of a model,
    and those that share its experts. For values that must be equal but that each rank measures by
    itself. All of these ranks call it, at the start of an engine."""
    if not parallel_state.model_parallel_is_initialized():
        return value
    for group in (
        parallel_state.get_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    ):
        if dist.get_world_size(group) > 1:
            # Groups that a user's Megatron made may know NCCL alone, which wants device memory.
            takes_host = "cpu:" in dist.get_backend_config(group)
            device = "cpu" if takes_host else torch.cuda.current_device()
            number = torch.full((1,), value, dtype=torch.int64, device=device)
            dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
            value = int(number.item())  # sync-ok: no engine runs yet
    return value


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
