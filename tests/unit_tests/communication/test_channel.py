"""What the leader sends arrives at each follower, whole and in order; reports and rounds of
integers come back."""

import asyncio
import random
import time

import msgspec
import pytest

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.errors import CommunicationTimeout, RankLost, RanksDisagree
from tests.support.patience import PATIENCE_S
from tests.support.ranks import run_ranks


class Add(msgspec.Struct, tag="add", array_like=True):
    request: int
    prompt: bytes


class End(msgspec.Struct, tag="end", array_like=True):
    pass


class Seen(msgspec.Struct, array_like=True):
    number: int
    text: str


MESSAGES = [Add(i, bytes([i % 256]) * (100_000 if i == 50 else i)) for i in range(500)]


def _send_and_receive(world):
    job = join_job(timeout_s=PATIENCE_S)
    members = list(reversed(range(world)))
    channel = StepChannel(job, members, Add | End, Seen)
    assert channel.is_leader == (job.rank == world - 1)
    if channel.is_leader:
        for message in MESSAGES:
            channel.send(message)
        channel.send(End())
        job.exchange("sent", "")  # only then followers read
        found = []
        while len(found) < 3 * (world - 1):
            found += channel.reports()
            time.sleep(0.001)
        channel.close()
        for rank in members[1:]:
            assert [seen for sender, seen in found if sender == rank] == [
                Seen(i, f"from {rank}") for i in range(3)
            ]
        return "led"
    job.exchange("sent", "")
    received = []
    while not isinstance(message := channel.receive(), End):
        received.append(message)
    assert received == MESSAGES
    with pytest.raises(CommunicationTimeout):
        channel.receive(0.0)
    with pytest.raises(CommunicationTimeout, match=f"'steps': rank {world - 1} .* did not come"):
        channel.receive(0.05)
    for i in range(3):
        channel.report(Seen(i, f"from {job.rank}"))
    return "followed"


def test_messages_arrive_in_order():
    assert run_ranks(4, _send_and_receive, 4) == ["followed"] * 3 + ["led"]


def _last_words():
    job = join_job(timeout_s=PATIENCE_S)
    channel = StepChannel(job, [0, 1], bytes)
    messages = [bytes([i]) * 400_000 for i in range(50)]
    if job.rank == 0:
        for message in messages:
            channel.send(message)
        channel.close()
        job.close()
        return None
    time.sleep(0.3)
    return [channel.receive() for _ in messages] == messages


def test_what_was_sent_before_the_goodbye_arrives():
    assert run_ranks(2, _last_words) == [None, True]


def _lose_a_message():
    job = join_job(timeout_s=PATIENCE_S)
    channel = StepChannel(job, [0, 1], int)
    if job.rank == 0:
        channel.send(1)
        channel._bus._sent += 2  # as if a connection had broken, and been made again
        channel.send(2)
        return
    assert channel.receive(20.0) == 1
    with pytest.raises(RankLost, match=r"message 4 of 'steps' from rank 0 \(.*, but 2 is the next"):
        channel.receive(20.0)
    return


def test_lost_messages_are_noticed():
    run_ranks(2, _lose_a_message)


def _wrong_way(members):
    job = join_job(timeout_s=PATIENCE_S)
    channel = StepChannel(job, [0, 1], int)
    if job.rank == 0:
        calls = [channel.receive, lambda: channel.report(1)]
    else:
        calls = [channel.reports, lambda: channel.send(1)]
    for call in calls:
        with pytest.raises(RuntimeError, match="ank 0 leads 'steps'"):
            call()
    with pytest.raises(ValueError, match=r"members=\[2\]"):
        StepChannel(job, [2], int)
    alone = StepChannel(job, [job.rank], int)
    alone.send(1)
    assert alone.reports() == []


def test_the_wrong_way_round():
    run_ranks(2, _wrong_way, [0, 1])


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
