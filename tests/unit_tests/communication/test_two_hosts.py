"""Two hosts on one machine: network namespaces joined by a virtual cable, which is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.errors import RankLost
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups

ADDRESSES = ("10.213.77.1", "10.213.77.2")
SETTINGS = {
    "MASTER_ADDR": ADDRESSES[0],
    "MEGATRON_ASYNC_SILENCE_S": "1",
}


def _namespaces_missing() -> str:
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"):
        return "two hosts need Linux's network namespaces, ip (iproute2) and unshare (util-linux)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "this user may not make network namespaces (run as root)"
    return ""


def _ip(command):
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)


def _wait_for(path):
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.005)
    return int(path.read_text() or 0)


def _write(path, text=""):
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)


def _move_in(folder, rank):
    """Ranks 0 and 1 live on the first host, rank 2 on the second."""
    if rank == 1:
        _wait_for(folder / "cable")
        with open(f"/proc/{_wait_for(folder / 'host0')}/ns/net") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        return
    os.unshare(os.CLONE_NEWNET)
    host = rank // 2
    _write(folder / f"host{host}", os.getpid())
    if host == 0:
        other = _wait_for(folder / "host1")
        _ip(f"link add cable0 type veth peer name cable1 netns {other}")
        _write(folder / "cable")
    else:
        _wait_for(folder / "cable")
    _ip("link set lo up")
    _ip(f"addr add {ADDRESSES[host]}/24 dev cable{host}")
    _ip(f"link set cable{host} up")


def _agree_until_lost(rounds):
    while True:  # on the second host, what came before the cut is enough for one round
        rounds.sync_all_reduce_max(1, timeout_s=20.0)


def _work_until_cut(folder):
    rank = int(os.environ["RANK"])
    _move_in(Path(folder), rank)
    job = join_job(timeout_s=30)
    steps = StepChannel(job, [0, 1, 2], int)
    rounds = AsyncZMQCommunicator(job, [0, 1, 2])
    for turn in range(20):
        if rank == 0:
            steps.send(turn)
        else:
            assert steps.receive(20.0) == turn
        assert rounds.sync_all_reduce_max(rank, turn) == [2, turn]
    ensure_process_groups(ParallelSizes())
    mine = torch.tensor([float(rank)])
    dist.all_reduce(mine)
    assert mine.item() == 3.0
    same_host = [record.on_host_of(job.me) for record in job.records]
    rounds.barrier("worked", 20.0)
    if rank == 2:
        _ip("link set cable1 down")
    start = time.monotonic()
    with pytest.raises(RankLost) as raised:
        _agree_until_lost(rounds)
    return same_host, job.address(), raised.value.ranks, str(raised.value), time.monotonic() - start


@pytest.mark.skipif(bool(_namespaces_missing()), reason=_namespaces_missing())
def test_a_host_is_cut_off(tmp_path):
    found = run_ranks(3, _work_until_cut, str(tmp_path), environment=SETTINGS)
    first, second = ADDRESSES
    assert [f[:3] for f in found] == [
        ([True, True, False], first, (2,)),
        ([True, True, False], first, (2,)),
        ([False, False, True], second, (0,)),
    ]
    for *_, text, seconds in found:
        assert "or the network between the hosts is down" in text
        assert seconds < 5
