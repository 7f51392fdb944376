"""The soak in small: thousands of requests, and nothing is left."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = spec_from_file_location("soak", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


def test_thousands_of_requests_leave_nothing(soak, tmp_path, capsys):
    path = tmp_path / "soak.json"
    arguments = ["--simulated", "--requests", "4000", "--no-progress", "--json", str(path)]
    # Imports of other tests and the allocator may grow a little; what a request keeps, shows.
    assert soak.main([*arguments, "--max-growth-mb", "24"]) == 0
    figures = json.loads(path.read_text())["figures"][0]
    for count in ("pauses", "evictions", "zombie_rows", "ended_by_aborted", "ended_by_stop_token"):
        assert figures[count] > 0, f"no {count}: the load is too easy"
    assert figures["requests"] == 4000
    assert "cpu_us_p99" in capsys.readouterr().out


def test_a_real_model_soaks_too(soak, capsys):
    arguments = ["--model", "dummy:tiny", "--device", "cpu", "--requests", "150", "--no-progress"]
    assert soak.main([*arguments, "--max-growth-mb", "64"]) == 0
    assert "ended_by_length" in capsys.readouterr().out


def test_growing_memory_fails(soak, capsys):
    arguments = ["--simulated", "--requests", "100", "--no-progress", "--max-growth-mb", "-1000"]
    assert soak.main(arguments) == 1
    assert "memory grew by" in capsys.readouterr().err


def test_a_wrong_token_fails(soak, monkeypatch):
    tokens = soak.HashTokens.sample

    def off_by_one(self, plan, context):
        found, counts = tokens(self, plan, context)
        found[0] ^= plan.step == 20
        return found, counts

    monkeypatch.setattr(soak.HashTokens, "sample", off_by_one)
    with pytest.raises(AssertionError, match=r"wrong tokens|ended|went on"):
        soak.main(["--simulated", "--requests", "500", "--no-progress"])
