"""What the leader sends arrives at each follower, whole and in order; reports come back."""

from __future__ import annotations

import time

import msgspec
import pytest

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.errors import CommunicationTimeout, RankLost
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
