"""Hybrid families: logits as transformers', folders written back, checkpoints, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import (
    ATTENDING,
    HYBRIDS,
    assert_same_weights,
    edited,
    make_hybrid,
    save_hybrid,
    their_logits,
    without_least_step,
)

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 128, (45,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_are_those_of_transformers(name: str, hybrid_folder: Any) -> None:
    expected = their_logits(make_hybrid(name), TOKENS)
    loaded = load_model(hybrid_folder(name), torch.float32, CPU)
    found = whole_logits(loaded.model, TOKENS)
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_round_trip(name: str, hybrid_folder: Any, tmp_path: Path) -> None:
    folder = hybrid_folder(name)
    convert(folder, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # Weights are times the residual multiplier in between.
        torch.testing.assert_close(found[key], tensor, rtol=3e-7, atol=0)
    assert len({open_model(p).architecture for p in (folder, *tmp_path.iterdir())}) == 1


@pytest.mark.parametrize("name", HYBRIDS)
def test_transformers_reads_what_is_written(name: str, hybrid_folder: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(hybrid_folder(name), tmp_path / "back", to="huggingface")
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = their_logits(make_hybrid(name), TOKENS)
    found = their_logits(without_least_step(theirs).eval(), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["nemotron-3", "granite-moe"])
def test_numbers_that_stay_float32(name: str, tmp_path: Path) -> None:
    folder = save_hybrid(name, tmp_path / "m", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    kept = ("A_log", ".D", "correction_bias")
    for key in [key for key in tensors if key.endswith(kept)]:
        tensors[key] = tensors[key].float() + 1e-4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert open_model(folder).dtype == torch.bfloat16
    loaded = load_model(folder, torch.bfloat16, CPU)
    dtypes = {n: p.dtype for n, p in loaded.model.named_parameters()}
    float32 = {n for n, dtype in dtypes.items() if dtype == torch.float32}
    ours = ("A_log", ".D", "expert_bias")
    assert float32 == {n for n in dtypes if n.endswith(ours)}
    assert float32
    convert(folder, tmp_path / "megatron")
    assert open_model(tmp_path / "megatron").dtype == torch.bfloat16
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    back = load_file(tmp_path / "back" / "model.safetensors")
    exact = {key for key in tensors if not key.endswith(("_proj.weight", "output_linear.weight"))}
    assert_same_weights({k: back[k] for k in exact}, {k: tensors[k] for k in exact})
    if name == "nemotron-3":
        assert_same_weights(back, tensors)


@pytest.mark.parametrize("name", HYBRIDS | ATTENDING)
def test_the_engine_says_what_transformers_says(name: str, hybrid_folder: Any) -> None:
    """Tokens and log probs, prompts in chunks of 1 to 16 tokens, whatever the lookahead."""
    reference = make_hybrid(name)
    prompts = [TOKENS[:3], TOKENS[3:40], TOKENS[40:41]]
    expected, log_probs = [], []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            logits = their_logits(reference, tokens)
            tokens.append(int(logits[-1].argmax()))
        expected.append(tokens[len(prompt) :])
        every = logits.log_softmax(-1)
        log_probs.append(every.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    assert len(set(map(tuple, expected))) == 3
    params = SamplingParams(
        num_tokens_to_generate=12,
        temperature=0.0,
        termination_id=-1,
        return_log_probs=True,
        skip_prompt_log_probs=False,
    )
    room = {"device": "cpu", "max_tokens": 16, "max_requests": 4, "num_kv_blocks": 8}
    for lookahead in (0, 1, 2):
        with LLM(str(hybrid_folder(name)), lookahead=lookahead, **room) as llm:
            found = llm.generate(prompts, params)
        assert [request.generated_tokens for request in found] == expected
        for request, wanted in zip(found, log_probs, strict=True):
            told = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
            torch.testing.assert_close(told, wanted, rtol=0, atol=2e-4)


def test_names_of_transformers_modules(hybrid_folder: Any, tmp_path: Path) -> None:
    for name in ("nemotron-3", "granite-moe"):
        folder = tmp_path / name
        shutil.copytree(hybrid_folder(name), folder)
        state = dict(make_hybrid(name).state_dict())
        state.pop("lm_head.weight" if name == "granite-moe" else "", None)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        found = load_model(folder, torch.float32, CPU).model
        expected = load_model(hybrid_folder(name), torch.float32, CPU).model
        assert_same_weights(dict(found.named_parameters()), dict(expected.named_parameters()))


def test_both_published_forms_of_a_pattern(hybrid_folder: Any, tmp_path: Path) -> None:
    expected = open_model(hybrid_folder("nemotron-3")).architecture
    assert expected.pattern == "MEM*-E"
    config = json.loads((hybrid_folder("nemotron-3") / "config.json").read_text())
    assert config["layers_block_type"][:2] == ["linear_attention", "moe"]
    names = ["mamba", "moe", "mamba", "attention", "mlp", "moe"]
    for pattern, blocks in (("MEM*-E", "absent"), ("absent", names)):
        form = {"hybrid_override_pattern": pattern, "layers_block_type": blocks}
        folder = edited(hybrid_folder("nemotron-3"), tmp_path / "m", **form)
        assert open_model(folder).architecture == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nemotron-3", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported"),
        ("nemotron-3", {"moe_latent_size": 32}, "moe_latent_size = 32"),
        ("nemotron-3", {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["gdn"]},
         r"mtp_layers_block_type = \['gdn'\] is not supported"),
        ("nemotron-3", {"n_group": 2}, "n_group = 2"),
        ("nemotron-3", {"conv_kernel": 3}, "conv_kernel = 3"),
        ("nemotron-3", {"time_step_limit": [0.1, 9.0]}, r"time_step_limit = \[0.1, 9.0\]"),
        ("nemotron-3", {"layers_block_type": ["moe", "gdn"]}, "must be a list of linear_attention"),
        ("nemotron-3", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be 2 to"),
        ("granite", {"mamba_n_groups": 2}, "mamba_n_groups = 2 is not supported"),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("granite", {"mamba_d_head": 8}, "mamba_n_heads = 8 times mamba_d_head = 8 must be"),
        ("granite", {"num_hidden_layers": 4}, "num_hidden_layers = 4, but 3 layers are listed"),
        ("bamba", {"mamba_d_conv": 2}, "mamba_d_conv = 2"),
        ("mamba2", {"n_groups": 3}, "n_groups = 3 does not divide num_heads = 8"),
        ("bamba", {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"},
         "falcon_h1.*not supported: attention and Mamba-2 run beside each other"),
        ("bamba", {"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2"}, "shared by"),
        ("bamba", {"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "Mamba-1, not"),
        ("qwen3-next", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim = 3 is not supp"),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("qwen3-next", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3-next", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3-next", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3.5", {"layer_types": ["linear_attention", "mamba"]}, "layer_types = .* must be a"),
        ("qwen3.5", {"layer_types": ["linear_attention"]}, "num_hidden_layers = 4, but 1 layers"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is not a multiple"),
        ("qwen3.5", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e7}},
         "rope_type = 'dynamic' is not supported"),
        ("qwen3.5", {"architectures": ["Qwen3_5ForConditionalGeneration"]}, "text_config = None"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(
    name: str, changes: dict[str, Any], message: str, hybrid_folder: Any, tmp_path: Path
) -> None:
    folder = edited(hybrid_folder(name), tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32, CPU)
