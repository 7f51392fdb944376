"""`scripts/compare_state_dtypes.py` and the forced tokens that it is made of."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from megatron_async import LLM, InferenceConfig, SamplingParams
from megatron_async.checkpoints import load_model
from megatron_async.errors import ConfigurationError
from megatron_async.parity.forced_tokens import forced_log_probs

SCRIPT = Path(__file__).parents[3] / "scripts" / "compare_state_dtypes.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("compare_state_dtypes", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["compare_state_dtypes"] = module
    spec.loader.exec_module(module)
    return module


def log_probs(sequences, prompt_tokens, state_dtype="float32", loudness=1.0):
    model = load_model("dummy:tiny-hybrid", torch.float32, CPU).model
    for name, parameter in model.named_parameters():
        if "in_proj" in name:
            parameter.data.mul_(loudness)
    config = InferenceConfig(
        device="cpu", lookahead=0, max_requests=len(sequences), num_kv_blocks=4,
        max_sequence_length=sequences.size(1), mamba_ssm_states_dtype=state_dtype,
    )  # fmt: skip
    return forced_log_probs(model, sequences, prompt_tokens, config)


def test_forced_tokens_are_decoded_as_they_would_be_prefilled():
    sequences = torch.randint(512, (3, 40), generator=torch.Generator().manual_seed(1))
    with LLM("dummy:tiny-hybrid", device="cpu", num_kv_blocks=8) as llm:
        params = SamplingParams(
            temperature=0.0, num_tokens_to_generate=1, return_log_probs=True, termination_id=-1
        )
        requests = llm.generate(sequences.tolist(), params)
        expected = torch.tensor([request.prompt_log_probs for request in requests])
    found = log_probs(sequences, 7)
    assert found.shape == (3, 33, 512)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(3, 33))
    said = found.gather(2, sequences[:, 7:, None])[..., 0]
    torch.testing.assert_close(said, expected[:, -33:], atol=1e-5, rtol=0)


def test_states_in_bfloat16_are_told_apart_and_the_same_are_equal(script):
    sequences = torch.randint(512, (2, 60), generator=torch.Generator().manual_seed(2))
    dtypes = ("float32", "float32", "bfloat16")
    first, same, rounded = (log_probs(sequences, 20, dtype, loudness=8.0) for dtype in dtypes)
    assert torch.equal(first, same)
    figures = script.compare(first, rounded, sequences[:, 20:])
    assert 1e-5 < figures["mean"] < figures["largest"] < 0.1
    assert figures["mean"] < 1e-2
    # The prompt has not been through a state yet.
    assert torch.equal(first[:, 0], rounded[:, 0])
    assert figures["perplexity"] == pytest.approx(figures["perplexity_float32"], rel=0.01)


def test_script(script, tmp_path, capsys):
    file, text = tmp_path / "figures.json", tmp_path / "text"
    arguments = ["--model", "dummy:tiny-hybrid", "--device", "cpu", "--tokens", "33"]
    assert script.main([*arguments, "--requests", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert [row["places"] for row in figures] == ["all", "first quarter", "last quarter"]
    for row in figures:
        assert 0 < row["forced_mean"] <= row["forced_largest"] <= row["largest"] < 1e-4
        assert row["same_best"] == 1
        # Random tokens: as likely as any other of 512.
        assert row["perplexity"] == pytest.approx(512, rel=0.1)
    assert "32 decode steps" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="no Mamba-2 layers, and no states: choose"):
        script.main(["--model", "dummy:tiny"])
    text.write_text("abc")
    with pytest.raises(ConfigurationError, match="no tokenizer for --text: leave it out"):
        script.main([*arguments, "--text", str(text)])
