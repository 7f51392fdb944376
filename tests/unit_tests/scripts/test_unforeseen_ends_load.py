"""The benchmark of the policies puts the load on the engine that it says, and counts its waste."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from engine_loads.unforeseen_ends import UnforeseenEnds

from megatron_async import LLM
from megatron_async.errors import ConfigurationError

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/benchmarks/benchmark_engine.py"


def run_script(*arguments):
    spec = spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    module.main(["ends", *map(str, arguments)])


def test_waste_by_rate(tmp_path, capsys):
    path = tmp_path / "record.json"
    run_script(
        *("--models", "dummy:tiny", "--device", "cpu", "--batch-size", 8, "--prompt-tokens", 4),
        *("--rates", 0, 0.3, "--lookahead", 1, 2, "--steps", 5, "--json", path),
    )
    record = json.loads(path.read_text())
    assert record["benchmark"] == "invalidation"
    assert len(record["figures"]) == 8 == len(capsys.readouterr().out.splitlines()) - 2
    for row in record["figures"]:
        rolls, ends = row["policy"] == "rollback", row["rate"] > 0
        assert row["ends_per_row"] == pytest.approx(row["rate"], abs=0.1)
        assert (row["zombie_rows"] > 0) == (ends and not rolls)
        assert (row["discarded_steps"] > 0) == (row["discarded_rows"] > 0) == (ends and rolls)
        assert (row["wasted_row_share"] > 0) == ends
        assert (row["overlap_ratio"] < 1) == (ends and rolls)
        assert row["step_ms"] > 0
        if not ends:
            assert row["rows"] == 8


def test_requests_end_at_the_tokens_that_were_drawn():
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=64, block_size_tokens=16) as llm:
        load = UnforeseenEnds(llm.engine, batch=4, prompt_tokens=3, length=40)
        lengths = []
        follow = load._follow

        def watched(report):
            for request in report["finished_request_records"]:
                recorded = load._recorded[request.request_id % 4]
                assert request.generated_tokens == recorded[: request.generated_length]
                lengths.append(request.generated_length)
            follow(report)

        load._follow = watched
        load.start(rate=0.2)
        while load.ended < 100:
            load.step()
        assert 4 < sum(lengths) / len(lengths) < 6
        load.stop()
        with pytest.raises(ConfigurationError, match=r"1\.5 must lie between 0 and 1"):
            load.start(rate=1.5)
