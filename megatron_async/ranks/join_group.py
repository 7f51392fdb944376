"""Connect the ranks of a job that torchrun started: leaders, followers, and sharers of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.ranks.actions import Report, Turn, to_builtin
from megatron_async.ranks.expert_consensus import SharedExperts
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.leader import Leader
from megatron_async.ranks.rank_group import RankGroup


@dataclass(frozen=True)
class RankPlace:
    """The place of this process in its job."""

    data_parallel_rank: int = 0
    """Number of its replica."""
    data_parallel_size: int = 1
    """Replicas in the job."""
    is_primary: bool = True
    """Whether it is its replica's leader, which callers talk to."""
    primary_ranks: tuple[int, ...] = (0,)
    """On a leader: the leaders of all replicas, in order; else empty."""
    needed_ranks: tuple[int, ...] = (0,)
    """Ranks without which this one cannot step: those of its replica, and those that share its
    experts."""


def join_group(check_agreement: bool) -> tuple[RankGroup, RankPlace]:
    """The group of this rank; every rank of the job calls it after its model is loaded.

    Args:
        check_agreement: compare plans and samples of followers with their leader's.

    Raises:
        CommunicationTimeout, RankLost: a rank did not join.
    """
    job = join_job()
    if job.world_size == 1:
        return RankGroup(), RankPlace()
    members = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
    experts = dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())
    # A rank's step ends only if those end of all ranks that hold a part of its experts.
    needed = sorted({expert - job.rank + member for expert in experts for member in members})
    place = RankPlace(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        job.rank == members[0],
        tuple(dist.get_process_group_ranks(parallel_state.get_data_parallel_group())),
        tuple(needed),
    )
    check = partial(job.watch.check, needed, "a step")
    channel: StepChannel[Turn, Report] = StepChannel(job, members, Turn, Report, to_builtin)
    if not place.is_primary:
        return Follower(channel, check, check_agreement), place
    leader = Leader(channel, check, check_agreement)
    if len(experts) == 1:
        return leader, place
    communicator = AsyncZMQCommunicator(job, experts, "the shape of a step")
    return SharedExperts(leader, communicator), place
