"""Process groups of several ranks, and sizes that fit no job."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_async.errors import ConfigurationError
from megatron_async.models.parallel_state import (
    ParallelSizes,
    agree_on_least,
    ensure_process_groups,
)
from tests.support.ranks import RankError, Ranks, run_ranks


def _sum_over_tensor_parallel_ranks() -> float:
    groups = ensure_process_groups(ParallelSizes(tensor_model_parallel=2))
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine, group=groups.tp)
    return mine.item()


def _least(of_rank: list[int], sizes: ParallelSizes) -> int:
    ensure_process_groups(sizes)
    return agree_on_least(of_rank[dist.get_rank()])


def _raise_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("not here")


def _sleep() -> None:
    time.sleep(30)


def test_tensor_parallel_ranks_are_neighbours():
    assert run_ranks(4, _sum_over_tensor_parallel_ranks) == [1.0, 1.0, 5.0, 5.0]


def test_ranks_that_step_together_agree_on_the_least():
    numbers = [7, 3, 5, 4]
    tensor = run_ranks(4, _least, numbers, ParallelSizes(tensor_model_parallel=2))
    assert tensor == [3, 3, 4, 4]
    both = ParallelSizes(tensor_model_parallel=2, expert_model_parallel=2)
    assert run_ranks(4, _least, numbers, both) == [3, 3, 3, 3]


def test_an_error_of_a_rank_is_told():
    with pytest.raises(RankError, match=r"(?s)rank 1:.*not here"):
        run_ranks(2, _raise_on_rank_1)


def test_a_killed_rank_is_told():
    ranks = Ranks(2, _sleep)
    ranks.kill(1)
    outcomes = ranks.join(2.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert "did not end" in outcomes[0].error


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tensor_model_parallel": 3}, 4, "multiple of 3 processes, but this job has 4"),
        ({"tensor_model_parallel": 2}, 1, "nproc-per-node=2"),
        ({"expert_model_parallel": 2}, 3, "does not divide the 3 data-parallel replicas"),
    ],
)
def test_sizes_that_do_not_fit_the_job(sizes, world, message):
    with pytest.raises(ConfigurationError, match=message):
        ParallelSizes(**sizes).data_parallel(world)


@pytest.mark.parametrize("value", [0, -1, True, "2", 1.0])
def test_sizes_that_are_none(value):
    with pytest.raises(ConfigurationError, match="tensor_model_parallel_size="):
        ParallelSizes(tensor_model_parallel=value)
