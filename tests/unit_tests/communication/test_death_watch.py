"""A rank that dies is named on all others, whatever they do; one that leaves is not dead."""

import asyncio
import ctypes
import os
import signal
import socket
import time

import pytest
import torch
import zmq
from msgspec.msgpack import encode

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.communication.death_watch import EXIT_CODE_RANK_LOST, DeathWatch
from megatron_async.errors import ConfigurationError, RankLost
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import Ranks, run_ranks

SHORT = {"MEGATRON_ASYNC_SILENCE_S": "1"}


def _kill_in_every_phase(victim):
    """The victim dies while each of the others waits in another way."""
    job = join_job(timeout_s=PATIENCE_S)
    members = list(range(job.world_size))
    steps = StepChannel(job, members, int)
    rounds = AsyncZMQCommunicator(job, members)
    idle = AsyncZMQCommunicator(job, members, name="idle")
    rounds.barrier("all are here")
    if job.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    waits = [
        lambda: rounds.barrier("a place"),
        steps.receive,
        lambda: rounds.sync_all_reduce_max(1),
        lambda: asyncio.run(rounds.all_reduce_max(1)),
        lambda: asyncio.run(idle.started()),
    ]
    with pytest.raises(RankLost) as raised:
        # Not rank 0, which has nothing to receive.
        waits[job.rank]()
    with pytest.raises(RankLost):
        steps.check()
    return raised.value.ranks, str(raised.value)


def test_a_stranger_does_not_end_the_watch():
    watch = DeathWatch(1)
    context = zmq.Context()
    with context.socket(zmq.PAIR) as stranger:
        stranger.connect(watch.bind("127.0.0.1", True)[0])
        watch.start()
        nested = b"\x82\xa4type\xa7Goodbye\xa1x" + b"\x91" * 100_000 + b"\x80"
        leaves = encode({"type": "Goodbye", "failure": ""})
        for message in (b"", b"\xc1", encode([1]), nested, leaves):
            stranger.send(message)
        eventually(lambda: watch.has_left(0))
    assert watch.losses == []
    watch.close()
    context.term()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named_in_every_phase(victim):
    outcomes = Ranks(5, _kill_in_every_phase, victim).join(PATIENCE_S)
    assert outcomes.pop(victim).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        assert not outcome.error
        ranks, text = outcome.value
        assert ranks == (victim,)
        assert f"lost rank {victim} (" in text
        assert "its process has ended without a goodbye. It was waiting for" in text


def _hang_after_loss(noticed_file):
    job = join_job(timeout_s=PATIENCE_S)
    job.watch.on_loss(lambda loss: noticed_file.write_text(str(loss.noticed)))
    job.exchange("here", "")
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_process_that_hangs_after_a_loss_is_ended(tmp_path):
    """Counted from the loss: how long processes take to start is the machine's affair."""
    environment, noticed = {"MEGATRON_ASYNC_LOSS_GRACE_S": "0.5"}, tmp_path / "noticed"
    outcome = Ranks(2, _hang_after_loss, noticed, environment=environment).join(PATIENCE_S)[0]
    assert outcome.exit_code == EXIT_CODE_RANK_LOST
    assert time.monotonic() - float(noticed.read_text()) > 0.5


def _end_beside_a_hanging_gpu(victim, wait):
    """The victim dies, or (None) one fails by itself, while its GPU waits for the other rank."""
    job = join_job(timeout_s=PATIENCE_S)
    job.exchange("here", "")
    if job.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim is None and job.rank == 1:
        time.sleep(PATIENCE_S)
    if victim is not None:
        eventually(lambda: job.watch.losses)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    waits = {
        "hangs": lambda: time.sleep(600),
        "keeps the GIL": lambda: ctypes.PyDLL(None).sleep(600),
        "raises": fail,
    }
    gpus = {"is_initialized": True, "device_count": 1, "memory_reserved": 1}
    for name, value in gpus.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.cuda.synchronize = lambda _: waits[wait]()
    raise ValueError("a step failed")


@pytest.mark.parametrize(
    ("victim", "wait", "code"),
    [
        (1, "hangs", EXIT_CODE_RANK_LOST),
        (1, "keeps the GIL", 1),
        (None, "hangs", 1),
        (None, "raises", 0),
    ],
)
def test_a_gpu_that_hangs_at_exit_does_not_keep_the_process(victim, wait, code):
    """Python's end frees what waits for the GPU, and no watch is left then."""
    environment = {"MEGATRON_ASYNC_LOSS_GRACE_S": "0.5"}
    ranks = Ranks(2, _end_beside_a_hanging_gpu, victim, wait, environment=environment)
    eventually(lambda: not ranks.processes[0].is_alive())
    ranks.kill(1)
    outcome = ranks.join(2 * PATIENCE_S)[0]
    assert outcome.exit_code == code
    assert "ValueError: a step failed" in outcome.error


def _stop(victim):
    job = join_job(timeout_s=PATIENCE_S)
    job.exchange("here", "")
    start = time.monotonic()
    if job.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        try:
            job.watch.check()
        except RankLost as error:
            return error.ranks, str(error), time.monotonic() - start
        time.sleep(0.01)


def _on_two_hosts(victim):
    """Ranks 1 and 2 live on the second host, as far as names go."""
    if os.environ["RANK"] != "0":
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname("second")
    return _stop(victim)


@pytest.mark.parametrize(
    ("function", "victim"),
    [
        (_stop, 0),
        (_stop, 2),
        pytest.param(
            _on_two_hosts,
            2,
            marks=pytest.mark.skipif(
                os.geteuid() != 0 or not hasattr(os, "CLONE_NEWUTS"),
                reason="a host of another name needs Linux, and root",
            ),
        ),
    ],
    ids=["rank 0", "rank 2", "another host"],
)
def test_a_stopped_rank_is_lost(function, victim):
    ranks = Ranks(3, function, victim, environment=SHORT)
    others = [rank for rank in range(3) if rank != victim]
    eventually(lambda: not any(ranks.processes[r].is_alive() for r in others))
    ranks.kill(victim)
    outcomes = ranks.join(PATIENCE_S)
    for rank in others:
        lost, text, seconds = outcomes[rank].value
        assert lost == (victim,)
        assert "was stopped (SIGSTOP?)" in text
        assert seconds > 0.5


def _hold_the_gil():
    job = join_job(timeout_s=PATIENCE_S)
    job.exchange("here", "")
    if job.rank == 1:
        ctypes.PyDLL(None).usleep(2_000_000)
    else:
        time.sleep(2.0)
    job.exchange("still here", "")
    return job.watch.losses


def test_a_thread_that_holds_the_gil_is_not_dead():
    assert run_ranks(2, _hold_the_gil, environment=SHORT) == [[], []]


def _leave():
    job = join_job(timeout_s=PATIENCE_S)
    rounds = AsyncZMQCommunicator(job, [0, 1, 2])
    rounds.barrier("all are here")
    if job.rank == 1:
        job.close()
        job.close()
        return "left"
    time.sleep(0.5)
    job.watch.check()
    with pytest.raises(RankLost, match=r"rank 1 \(.*\) left the job in order.*barrier 'without"):
        rounds.barrier("without one")
    found = [job.watch.has_left(rank) for rank in range(3)]
    time.sleep(2)  # or the other, which may be late, finds that this rank has left too
    return found


def test_who_leaves_is_not_dead_but_not_waited_for():
    assert run_ranks(3, _leave) == [[False, True, False], "left", [False, True, False]]


def _fail():
    job = join_job(timeout_s=PATIENCE_S)
    heard = []
    job.watch.on_loss(lambda loss: heard.append(loss.rank))
    rounds = AsyncZMQCommunicator(job, [0, 1])
    if job.rank == 1:
        raise ValueError("no such file")
    with pytest.raises(RankLost) as raised:
        rounds.barrier("here")
    while not heard:  # it comes from another thread
        time.sleep(0.01)
    return str(raised.value), heard


def test_who_ends_with_an_exception_says_which():
    outcome = Ranks(2, _fail).join(PATIENCE_S)[0]
    text, heard = outcome.value
    assert "it ended with ValueError: no such file" in text
    assert heard == [1]


def _fail_over():
    job = join_job(timeout_s=PATIENCE_S)
    job.watch.end_process_after_s = None
    mine = [0, 1] if job.rank < 2 else [2, 3]
    rounds = AsyncZMQCommunicator(job, mine, name=f"agreement of {mine}")
    rounds.barrier("here")
    if job.rank == 3:
        time.sleep(0.2)  # or it might take its last word with it
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == 2:
        with pytest.raises(RankLost):
            rounds.barrier("there")
        return "lost"
    while not job.watch.losses:
        time.sleep(0.01)
    return [rounds.sync_all_reduce_max(job.rank + turn) for turn in range(3)]


def test_groups_that_lost_nobody_go_on():
    outcomes = Ranks(4, _fail_over).join(PATIENCE_S)
    assert [o.value for o in outcomes] == [[[1], [2], [3]], [[1], [2], [3]], "lost", None]


@pytest.mark.parametrize("name", ["MEGATRON_ASYNC_SILENCE_S", "MEGATRON_ASYNC_LOSS_GRACE_S"])
def test_times_that_are_none(monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ConfigurationError, match=f"{name}='soon'"):
        DeathWatch(0)
