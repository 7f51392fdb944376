"""Ranks meet, on one host without a port; and whatever can be wrong with a start is named."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_async.communication import bootstrap
from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.exchange import StoreExchange
from megatron_async.communication.local_ranks import LocalRanks, RankEnd
from megatron_async.communication.own_folder import FOLDER_VARIABLE
from megatron_async.communication.rendezvous import Launch, open_store
from megatron_async.errors import CommunicationTimeout, ConfigurationError, RankLost
from tests.support.patience import PATIENCE_S
from tests.support.ranks import Ranks, free_port, run_ranks


def _meet(world):
    job = join_job(timeout_s=PATIENCE_S)
    assert join_job() is job
    assert [record.rank for record in job.records] == list(range(world))
    assert {record.world_size for record in job.records} == {world}
    assert job.hosts == (socket.gethostname(),) * world
    assert job.exchange("words", f"of {job.rank}") == {r: f"of {r}" for r in range(world)}
    job.check_same("config", {"max_tokens": 4096, "dtype": "float32"})
    return job.records[job.rank].pid == os.getpid(), str(job.records)


def test_all_ranks_know_all_ranks():
    found = run_ranks(4, _meet, 4)
    assert found == [(True, found[0][1])] * 4


def test_a_process_alone_opens_nothing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = threading.active_count()
    job = join_job()
    job.check_same("config", {"anything": 1})
    assert (job.rank, job.world_size, job.exchange("words", "x")) == (0, 1, {0: "x"})
    job.watch.check()
    job.close()
    assert threading.active_count() == threads


def _join_as(changes, timeout_s=PATIENCE_S):
    """Join with a changed environment; the error's name and text."""
    os.environ.update(changes.get(int(os.environ["RANK"]), {}))
    with pytest.raises((ConfigurationError, CommunicationTimeout, RankLost)) as raised:
        join_job(timeout_s)
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: {"RANK": "1"}}, r"RANK=1 was started twice: rank 1 \(.*pid.*\) and rank 1 \("),
        ({1: {"WORLD_SIZE": "2"}}, r"WORLD_SIZE=(2|3), but rank \d \(.*\) has WORLD_SIZE=(2|3)"),
    ],
)
def test_ranks_that_do_not_fit_together(changes, message):
    for name, text in run_ranks(3, _join_as, changes):
        assert name == "ConfigurationError"
        assert re.search(message, text)


def _disagree():
    job = join_job(timeout_s=PATIENCE_S)
    config = {"dtype": "float32", "max_tokens": 512 if job.rank == 1 else 4096, "late": job.rank}
    with pytest.raises(ConfigurationError) as raised:
        job.check_same("config", config)
    return str(raised.value)


def test_a_config_that_differs():
    for text in run_ranks(3, _disagree):
        assert "disagree about the config: max_tokens is 4096 on ranks 0 and 2, 512 on" in text
        assert "late" not in text


def _other_version():
    if os.environ["RANK"] == "1":
        bootstrap.__version__ = "9.9"
    return _join_as({})


def test_software_that_differs():
    for name, text in run_ranks(2, _other_version):
        assert name == "ConfigurationError"
        assert "9.9 on rank 1" in text


def _come_without(missing):
    if int(os.environ["RANK"]) in missing:
        return None
    # Rank 2 waits longer: the first to give up is a lost rank to the other.
    return _join_as({}, timeout_s=1.0 + int(os.environ["RANK"]))


def test_a_missing_rank_is_named():
    found = run_ranks(3, _come_without, [1])
    name, text = found[0]
    assert name == "CommunicationTimeout"
    assert "all 3 ranks to start: rank 1 did not come" in text
    assert "torchrun" in text
    assert found[2][0] in ("CommunicationTimeout", "RankLost")


def _die_while_joining(victim):
    rank = int(os.environ["RANK"])
    if rank == 1:
        return None  # all wait for this one
    if rank == victim:
        peek = StoreExchange.peek

        def peek_and_die(*args):
            """Once the other has come, which then waits."""
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            return peek(*args)

        StoreExchange.peek = peek_and_die
    return _join_as({})


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_the_job_starts(victim):
    outcomes = Ranks(3, _die_while_joining, victim).join(PATIENCE_S)
    name, text = outcomes[2 - victim].value
    assert outcomes[victim].exit_code == -signal.SIGKILL
    assert name == "RankLost"
    assert f"rank {victim}" in text


def test_a_port_in_use():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port} .*in use.*MASTER_PORT"):
            open_store(Launch(0, 2, 0, "127.0.0.1", port), 10.0)


def test_an_attempt_of_torchrun_sees_nothing_of_the_one_before(monkeypatch):
    launch = Launch(0, 2, 0, "127.0.0.1", free_port())
    first = open_store(launch, 10.0)
    first.set("key", "value")
    assert open_store(launch, 10.0).check(["key"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not open_store(launch, 10.0).check(["key"])


def test_an_unreachable_master():
    port = free_port()
    with pytest.raises(CommunicationTimeout, match=rf"no store at 127.0.0.1:{port} within 0.3 s"):
        open_store(Launch(1, 2, 1, "127.0.0.1", port), 0.3)


def _claim_for_ever(exchange):
    while True:
        exchange.claim("ranks", "mine")


def _claim_in_a_store_that_goes():
    launch = Launch.from_environment()
    store = open_store(launch, 20.0)
    if launch.hosts_store:
        store.wait(["rank 1 is here"])
        os.kill(os.getpid(), signal.SIGKILL)
    exchange = StoreExchange(store, launch.rank, False)
    store.set("rank 1 is here", "")
    with pytest.raises(RankLost, match="rank 0 has ended"):
        _claim_for_ever(exchange)


def test_the_store_goes_before_the_ranks_have_met():
    assert not Ranks(2, _claim_in_a_store_that_goes).join(PATIENCE_S)[1].error


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2"}, "RANK and"),
        (dict(RANK="2", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1"), "RANK=2 is not below"),
        (dict(RANK="a", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1"), "RANK='a' is not an"),
        (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="0"), "MASTER_PORT=0 is no"),
    ],
)
def test_an_environment_that_makes_no_sense(monkeypatch, variables, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        Launch.from_environment()


SAY = "import json, os; print(json.dumps(dict(os.environ)))"
FAIL = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(600)"
LAST = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("here", flush=True)
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_ranks_know_their_place(tmp_path, monkeypatch, capfdbinary: pytest.CaptureFixture[bytes]):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    logs = tmp_path / "logs"
    assert LocalRanks(python(SAY), 2, tmp_path, logs).run() is None
    for rank in range(2):
        found = json.loads((logs / f"rank{rank}.stdout.log").read_text())
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert found[FOLDER_VARIABLE] == str(tmp_path)
        assert "TORCHELASTIC_USE_AGENT_STORE" not in found
        assert int(found["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 2)
    assert len(capfdbinary.readouterr().out.splitlines()) == 2


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    end = LocalRanks(python(FAIL), 3, tmp_path).run()
    assert end is not None
    assert (end.rank, end.code, end.status) == (1, 7, 7)
    killed = RankEnd(2, 77, -signal.SIGKILL)
    assert (killed.status, str(killed)) == (137, "rank 2 (pid 77) ended with SIGKILL")


def test_a_signal_goes_on_to_all_ranks(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from megatron_async.communication.local_ranks import LocalRanks;"
        f"sys.exit(LocalRanks([sys.executable, '-c', {LAST!r}], 2, Path({str(tmp_path)!r})).run())"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert [starter.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(PATIENCE_S) == 0


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="/no/such cannot be run on 2 ranks"):
        LocalRanks(["/no/such"], 2, tmp_path).run()
