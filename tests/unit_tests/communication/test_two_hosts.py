"""Two hosts on one machine: network namespaces joined by a virtual cable, which is cut."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.communication.death_watch import EXIT_CODE_RANK_LOST
from megatron_async.errors import RankLost
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import Ranks, run_ranks

ADDRESSES = ("10.213.77.1", "10.213.77.2")
SETTINGS = {"MASTER_ADDR": ADDRESSES[0], "LOCAL_WORLD_SIZE": "1", "MEGATRON_ASYNC_SILENCE_S": "1"}


def _namespaces_missing() -> str:
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"):
        return "two hosts need Linux's network namespaces, ip (iproute2) and unshare (util-linux)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "this user may not make network namespaces (run as root)"
    return ""


def _ip(command):
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=PATIENCE_S)


def _wait_for(path):
    eventually(path.exists, str(path))
    return int(path.read_text() or 0)


def _write(path, text=""):
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)


def _move_in(folder, host, is_first):
    """Live on host 0 or 1 from now on; the first there makes it."""
    if not is_first:
        _wait_for(folder / "cable")
        with open(f"/proc/{_wait_for(folder / f'host{host}')}/ns/net") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        return
    os.unshare(os.CLONE_NEWNET)
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
        rounds.sync_all_reduce_max(1, timeout_s=PATIENCE_S)


def _work_until_cut(folder):
    rank = int(os.environ["RANK"])
    _move_in(Path(folder), host=rank // 2, is_first=rank != 1)
    job = join_job(timeout_s=PATIENCE_S)
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
    with pytest.raises(RankLost) as raised:
        _agree_until_lost(rounds)
    return same_host, job.address(), raised.value.ranks, str(raised.value)


@pytest.mark.skipif(bool(_namespaces_missing()), reason=_namespaces_missing())
def test_a_host_is_cut_off(tmp_path):
    found = run_ranks(3, _work_until_cut, str(tmp_path), environment=SETTINGS)
    first, second = ADDRESSES
    assert [f[:3] for f in found] == [
        ([True, True, False], first, (2,)),
        ([True, True, False], first, (2,)),
        ([False, False, True], second, (0,)),
    ]
    for *_, text in found:
        assert "or the network between the hosts is down" in text


PROMPTS = [[1, 2, 3], list(range(40, 90)), [7]]


def _answers(llm, length=12):
    from megatron_async import SamplingParams

    params = SamplingParams(num_tokens_to_generate=length, temperature=0.0, termination_id=-1)
    return [output.generated_tokens for output in llm.generate(PROMPTS, params)]


def _tiny(**options):
    from megatron_async import LLM

    settings = {"num_kv_blocks": 32, "block_size_tokens": 16, "max_sequence_length": 256}
    return LLM("dummy:tiny", device="cpu", **settings, **options)


def _generate_until_cut(folder):
    rank = int(os.environ["RANK"])
    _move_in(Path(folder), host=rank, is_first=True)
    with _tiny(tensor_model_parallel_size=2) as llm:
        _write(Path(folder, f"answers{rank}"), _answers(llm))
        if rank == 1:
            threading.Timer(0.3, _cut, [folder]).start()
        try:
            while True:
                _answers(llm, 150)
        except RankLost as error:
            _write(Path(folder, f"lost{rank}"), f"{error.ranks} {error}")
            raise


def _cut(folder):
    _ip("link set cable1 down")
    _write(Path(folder, "cut"))


@pytest.mark.skipif(bool(_namespaces_missing()), reason=_namespaces_missing())
def test_a_model_on_two_hosts_is_cut_in_two(tmp_path):
    with _tiny() as llm:
        alone = _answers(llm)
    settings = {**SETTINGS, "MEGATRON_ASYNC_LOSS_GRACE_S": "2"}
    ranks = Ranks(2, _generate_until_cut, str(tmp_path), environment=settings)
    while not (tmp_path / "cut").exists():
        assert all(process.is_alive() for process in ranks.processes)
        time.sleep(0.01)
    outcomes = ranks.join()
    assert (tmp_path / "answers0").read_text() == str(alone)
    assert (tmp_path / "answers1").read_text() == "[]"
    for rank, outcome in enumerate(outcomes):
        lost = (tmp_path / f"lost{rank}").read_text()
        assert lost.startswith(f"({1 - rank},) "), lost
        assert "or the network between the hosts is down" in lost
        # Gloo waits for the other's part of the step, so that the engine cannot be closed.
        assert "RankLost" in outcome.error or outcome.exit_code == EXIT_CODE_RANK_LOST
