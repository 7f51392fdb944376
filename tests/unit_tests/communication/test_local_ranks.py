"""Ranks of one host: they are started without a port, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.communication.local_ranks import LocalRanks, RankEnd
from megatron_async.communication.own_folder import FOLDER_VARIABLE
from megatron_async.errors import ConfigurationError
from tests.support.patience import PATIENCE_S

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


def test_ranks_know_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
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
