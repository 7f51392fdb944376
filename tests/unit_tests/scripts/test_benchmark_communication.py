"""The benchmark of the CPUs' agreement measures each backend and the channel."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/benchmarks/benchmark_communication.py"


def _run(path):
    spec = spec_from_file_location("benchmark_communication", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["benchmark_communication"] = module
    spec.loader.exec_module(module)
    module.main(["--rounds", "20", "--backends", "zmq", "gloo", "--json", path])


def test_two_ranks(tmp_path):
    path = tmp_path / "communication.json"
    run_ranks(2, _run, str(path))
    record = json.loads(path.read_text())
    assert record["settings"]["ranks"] == 2
    names = ["all_reduce_max zmq", "all_reduce_max gloo", "channel send", "channel one way"]
    found = [(figure["what"], figure["pause_us"]) for figure in record["figures"]]
    assert sorted(found) == sorted((name, pause) for name in names for pause in (0.0, 1000.0))
    assert all(0 < figure["p50_us"] <= figure["p99_us"] for figure in record["figures"])
