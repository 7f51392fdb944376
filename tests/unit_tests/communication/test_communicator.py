"""Rounds of integers: the right maximum, on all, in the right round."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.errors import CommunicationTimeout, RanksDisagree
from tests.support.patience import PATIENCE_S
from tests.support.ranks import run_ranks


def _values(rank, turn):
    numbers = random.Random(100 * turn + rank)
    return [numbers.randint(-(2**62), 2**62) for _ in range(4)]


def _many_rounds(world):
    job = join_job(timeout_s=PATIENCE_S)
    rounds = AsyncZMQCommunicator(job, range(world))
    jitter = random.Random(job.rank)
    for turn in range(80):
        expected = [max(column) for column in zip(*(_values(r, turn) for r in range(world)))]
        mine = _values(job.rank, turn)
        kind = turn % 4
        if kind == 0:
            assert rounds.sync_all_reduce_max(*mine) == expected
        elif kind == 1:
            pending = rounds.start_all_reduce_max(*mine)
            later = rounds.start_all_reduce_max(turn)
            assert pending.result() == expected
            assert later.result() == [turn]
        elif kind == 2:
            root = turn % world
            values = mine if job.rank == root else None
            assert rounds.sync_broadcast(values, root) == _values(root, turn)
        else:
            assert asyncio.run(rounds.all_reduce_max(*mine)) == expected
            rounds.barrier(f"turn {turn}")
        if jitter.random() < 0.1:
            time.sleep(0.002)
    return True


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_round_has_its_maximum(world):
    assert all(run_ranks(world, _many_rounds, world))


def _late():
    job = join_job(timeout_s=PATIENCE_S)
    rounds = AsyncZMQCommunicator(job, [0, 1, 2])
    rounds.barrier("start")
    if job.rank == 2:
        time.sleep(1.0)  # gives up nothing: the others' values are there
        first = rounds.sync_all_reduce_max(902)
    else:
        with pytest.raises(CommunicationTimeout, match=r"round 2 .*: rank 2 \(.*did not come") as e:
            rounds.sync_all_reduce_max(900 + job.rank, timeout_s=0.3)
        assert e.value.missing == (2,)
        first = None
    # What rank 2 said in the round that the others gave up (902) is not heard in this one.
    return first, rounds.sync_all_reduce_max(job.rank, 7)


def test_a_late_message_of_an_aborted_round():
    assert run_ranks(3, _late) == [(None, [2, 7]), (None, [2, 7]), ([902], [2, 7])]


def _disagree():
    job = join_job(timeout_s=PATIENCE_S)
    rounds = AsyncZMQCommunicator(job, [0, 1])
    calls = [lambda: rounds.barrier("loaded"), lambda: rounds.sync_all_reduce_max(1, 2)]
    with pytest.raises(RanksDisagree) as raised:
        calls[job.rank]()
    return str(raised.value)


def test_rounds_out_of_step():
    here, there = run_ranks(2, _disagree)
    assert "is barrier 'loaded' on rank 0, but all_reduce_max of 2 on rank 1" in here
    assert "is all_reduce_max of 2 on rank 1, but barrier 'loaded' on rank 0" in there


def _doorbell():
    job = join_job(timeout_s=PATIENCE_S)
    rounds = AsyncZMQCommunicator(job, [0, 1, 2])
    rounds.barrier("start")
    if job.rank == 0:  # has work, after a while
        time.sleep(0.3)
        assert not rounds.has_started()
        return [rounds.sync_all_reduce_max(1), rounds.sync_all_reduce_max(1)]
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(rounds.started(), 0.01))
    asyncio.run(asyncio.wait_for(rounds.started(), PATIENCE_S))
    assert rounds.has_started()
    found = [rounds.sync_all_reduce_max(0), rounds.sync_all_reduce_max(0)]
    assert not rounds.has_started()
    return found


def test_an_idle_rank_hears_that_a_round_has_begun():
    assert run_ranks(3, _doorbell) == [[[1], [1]]] * 3


def _misuse():
    rounds = AsyncZMQCommunicator(join_job(timeout_s=PATIENCE_S), [0])
    assert rounds.sync_all_reduce_max(3, -4) == [3, -4]
    assert asyncio.run(rounds.all_reduce_max(5)) == [5]
    rounds.barrier("alone")
    with pytest.raises(ValueError, match="root=1 is no member"):
        rounds.sync_broadcast([1], 1)
    with pytest.raises(TypeError):
        rounds.sync_all_reduce_max(1.5)


def test_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    _misuse()
