"""`scripts/check_parity.py`: agrees where it should, and says where it does not."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.config import InferenceConfig
from megatron_async.lab import references
from megatron_async.lab.divergence import find_divergences, tolerance
from megatron_async.planning import dynamic_context
from tests.support.capturing_cpu import CapturingCpu
from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_parity.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("check_parity", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_parity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_agrees(script: Any, dtype: str, tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["--model", "dummy:tiny", "--dtype", dtype, "--tokens", "24", "--json", str(file)]
    arguments += ["--block-size-tokens", "16", "--num-kv-blocks", "13"]
    assert script.main(arguments) == 0
    assert capsys.readouterr().out.endswith("OK\n")
    report = json.loads(file.read_text())
    assert report["failed"] == 0
    runs = [outcome["run"] for outcome in report["outcomes"]]
    assert [(run["lookahead"], run["batch_size"]) for run in runs] == [
        (lookahead, batch) for lookahead in (0, 1, 2) for batch in (1, 8)
    ]
    for run, outcome in zip(runs, report["outcomes"], strict=True):
        if dtype == "float32":
            assert outcome["identical"] == run["batch_size"]
        assert run["overlap_ratio"] <= (run["lookahead"] > 0)
        assert (run["overlap_ratio"] > 0.5) == (run["lookahead"] > 0)
        assert (run["pauses"] > 0) == (run["batch_size"] == 8)


def _check_on_a_rank(file: str) -> int:
    arguments = ["--model", "dummy:tiny", "--tensor-model-parallel-size", "2", "--tokens", "8"]
    arguments += ["--lookahead", "1", "--batch-sizes", "2", "--json", file]
    return int(load_script().main(arguments))


def test_ranks_agree(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run_ranks(2, _check_on_a_rank, str(file)) == [0, 0]
    (outcome,) = json.loads(file.read_text())["outcomes"]
    assert outcome["identical"] == 2
    assert outcome["run"]["overlap_ratio"] == 1.0


def test_transformers_agrees(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "dummy:tiny", "--reference", "transformers", "--tokens", "12"]
    assert script.main([*arguments, "--batch-sizes", "4", "--lookahead", "1"]) == 0
    assert "reference: transformers" in capsys.readouterr().out


def test_wrong_weights_fail(script: Any, monkeypatch, capsys):
    """The engine under test and its reference hold different weights."""
    round_weights: Callable[..., None] = references.round_weights

    def spoil(model: torch.nn.Module, dtype: torch.dtype) -> None:
        round_weights(model, dtype)
        dict(model.named_parameters())["decoder.final_norm.weight"].data.neg_()

    monkeypatch.setattr(references, "round_weights", spoil)
    assert script.main(["--model", "dummy:tiny", "--tokens", "8", "--lookahead", "1"]) == 1
    output = capsys.readouterr().out
    assert output.endswith("FAIL\n")
    assert "gap to the engine's token" in output


def test_the_reference_captures_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay leaves no logits behind: those of a captured step's warm-up were taken for them."""
    monkeypatch.setattr(dynamic_context, "make_device", lambda _name: CapturingCpu())
    settings = {"max_requests": 2, "max_sequence_length": 64, "num_kv_blocks": 8}
    config = InferenceConfig(lookahead=0, block_size_tokens=16, max_tokens=64, **settings)
    reference = references.EngineReference("dummy:tiny", "cpu", torch.float32, config)
    assert reference._engine.context.device.captures_graphs
    assert not reference._engine.controller.graphs.count


def test_first_difference_is_judged_by_the_reference() -> None:
    class Reference:
        """Undecided between tokens 1 and 2; token 3 is far behind."""

        asked: list[list[int]] = []  # noqa: RUF012

        def last_logits(self, tokens: list[int]) -> torch.Tensor:
            self.asked.append(tokens)
            return torch.tensor([0.0, 10.0, 9.99, 5.0])

    expected = [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
    found = [[1, 1, 1], [1, 2, 0], [1, 1, 3]]
    near, far = find_divergences(
        [[7], [8], [9]], expected, found, Reference(), torch.bfloat16, num_blocks=4
    )
    assert Reference.asked == [[8, 1], [9, 1, 1]]
    assert (near.request, near.position, near.engine_token) == (1, 1, 2)
    assert near.gap == pytest.approx(0.01, abs=1e-5)
    assert near.tolerance == pytest.approx(10 * 2**-8 * 2)
    assert near.is_near_tie
    assert (far.request, far.position, far.engine_token) == (2, 2, 3)
    assert not far.is_near_tie
    strict = tolerance(torch.tensor([10.0]), torch.float32, 4)
    assert strict == pytest.approx(10 * 2**-24 * 2)
