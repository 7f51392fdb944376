"""Models whose weights stay quantised, whole: their tokens, what rounds 16-bit checkpoints at load,
and what is refused. Devices here are CPUs; what keeps weights on a GPU is asked of them too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_async.checkpoints.quantised_model as quantised_model
from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.convert import convert
from megatron_async.models.held_weight import quantised_weights
from tests.support.quantised_folders import quantised_folder

CPU = torch.device("cpu")
DENSE = "dummy:qwen3:layers=2,hidden=256,heads=2,groups=2,head=128,ffn=384,vocab=256"
GREEDY = SamplingParams(
    num_tokens_to_generate=8, temperature=0.0, termination_id=-1, return_log_probs=True
)


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps what a GPU does."""
    monkeypatch.setattr(quantised_model, "keeps_on", lambda device: True)


def generated(model: Any, **settings: Any) -> tuple[Any, Any]:
    """Tokens and log probs, and the names of weights that are quantised."""
    with LLM(str(model), device="cpu", max_tokens=32, max_requests=2, **settings) as llm:
        requests = llm.generate([[5, 9, 17], list(range(30, 50))], GREEDY)
        served = llm.engine.controller.inference_wrapped_model.model
        names = {name for name, _ in quantised_weights(served)}
    return [(r.generated_tokens, r.generated_log_probs) for r in requests], names


def assert_same(found: Any, expected: Any) -> None:
    for (tokens, log_probs), (theirs, expected_log_probs) in zip(found, expected, strict=True):
        assert tokens == theirs
        torch.testing.assert_close(
            torch.tensor(log_probs), torch.tensor(expected_log_probs), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["fp8 blocks", "compressed nvfp4", "gptq zeros"])
def test_a_dense_model_says_what_the_decoded_one_says(kind: str, keeps, tmp_path: Path) -> None:
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", kind)
    found, names = generated(folder)
    assert len(names) == 8
    decoded, none = generated(folder, quantization="none")
    assert not none
    assert_same(found, decoded)
