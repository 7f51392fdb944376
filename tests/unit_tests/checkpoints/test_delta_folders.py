"""Families with Gated DeltaNet: long prompts in odd chunks, vision towers, both forms of experts,
bits that stay, refusals. What they share with other hybrids is in `test_hybrid_folders.py`."""

import json
import logging
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface_config import write_config
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import (
    COMMON,
    HYBRIDS,
    assert_same_weights,
    edited,
    make_hybrid,
    their_logits,
)

CPU = torch.device("cpu")
FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
TOKENS = torch.randint(0, 128, (400,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPTS = [TOKENS[:300], TOKENS[300:303], TOKENS[100:229], TOKENS[399:]]
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
    "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip


@cache
def reference(name: str) -> Any:
    return make_hybrid(name)


@cache
def reference_log_probs(name: str, tokens: tuple[int, ...]) -> torch.Tensor:
    return their_logits(reference(name), list(tokens)).log_softmax(-1)


def check_engine(folder: Path, name: str, prompts: list[list[int]], **settings: Any) -> None:
    """Log probs of all tokens are transformers', and each generated token is its choice, or as good
    as it."""
    params = SamplingParams(
        num_tokens_to_generate=20,
        temperature=0.0,
        termination_id=-1,
        return_log_probs=True,
        skip_prompt_log_probs=False,
    )
    with LLM(str(folder), device="cpu", block_size_tokens=64, num_kv_blocks=32, **settings) as llm:
        found = llm.generate(prompts, params)
    for request, prompt in zip(found, prompts, strict=True):
        tokens = [*prompt, *request.generated_tokens]
        expected = reference_log_probs(name, tuple(tokens))
        of_tokens = expected.gather(1, torch.tensor([*tokens[1:], 0])[:, None])[:-1, 0]
        told = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
        torch.testing.assert_close(told, of_tokens, rtol=0, atol=1e-3)
        first = len(prompt) - 1
        best = expected[first:-1].max(1).values
        assert (best - of_tokens[first:] < 1e-3).all(), "a choice that was no near tie"
        assert len(set(request.generated_tokens)) > 5, "a dull model hides wrong states"


@pytest.mark.parametrize("chunk", [1, 2, 3, 127, 128, 129])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_in_chunks(name: str, chunk: int, hybrid_folder: Any) -> None:
    lookahead = chunk % 3
    settings = {"max_requests": 1, "max_tokens": chunk, "lookahead": lookahead}
    # One border of 128 for small chunks, each of which is a step; two for those of its size.
    prompt = TOKENS[: 140 if chunk < 100 else 300]
    check_engine(hybrid_folder(name), name, [prompt], **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_beside_others(name: str, lookahead: int, hybrid_folder: Any) -> None:
    """Chunks and decode rows in the same steps; fewer slots than requests."""
    settings = {"max_requests": 3, "max_tokens": 140, "lookahead": lookahead}
    check_engine(hybrid_folder(name), name, PROMPTS, **settings)


def with_vision(name: str, folder: Path) -> Any:
    """A model with a vision tower, as transformers saves it, and tensors of multi-token prediction,
    as published folders have them."""
    import transformers

    kind, options = HYBRIDS[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config=COMMON | options | {"tie_word_embeddings": False},
        vision_config=VISION,
        tie_word_embeddings=True,
    )
    torch.manual_seed(2)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    text = make_hybrid(name).model.state_dict()
    model.model.language_model.load_state_dict(text)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_language_model_beside_a_vision_tower(name: str, tmp_path, caplog):
    model = with_vision(name, tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors").keys()
    assert any(key.startswith("model.language_model.layers.0.") for key in names)
    with caplog.at_level(logging.WARNING, "megatron_async"):
        loaded = load_model(tmp_path / "m", torch.float32, CPU)
    towers = sum(key.startswith("model.visual.") for key in names)
    said = sorted(record.getMessage() for record in caplog.records)
    mtp = "multi-token prediction that config.json does not describe"
    assert said == [
        f"{tmp_path / 'm'}: {what} ({count} tensors) is not loaded."
        for what, count in ((mtp, 2), ("the vision tower", towers))
    ]
    assert loaded.architecture.tie_word_embeddings
    assert loaded.architecture.eos_token_ids == (2,)
    assert loaded.architecture.bos_token_id == 1
    expected = their_logits(model, TOKENS[:45])
    torch.testing.assert_close(whole_logits(loaded.model, TOKENS[:45]), expected, rtol=0, atol=1e-4)
    convert(tmp_path / "m", tmp_path / "text", to="huggingface")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["architectures"] == [f"{HYBRIDS[name][0]}ForCausalLM"]
    again = load_model(tmp_path / "text", torch.float32, CPU)
    assert again.architecture == loaded.architecture
    assert_same_weights(*(dict(m.model.named_parameters()) for m in (again, loaded)))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_both_forms_of_experts(name: str, hybrid_folder: Any, tmp_path: Path) -> None:
    """Published folders have a tensor for each expert, or, as transformers' modules, one of all."""
    state = make_hybrid(name).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    stored = load_file(hybrid_folder(name) / "model.safetensors")
    assert "model.layers.0.mlp.experts.5.gate_proj.weight" in stored
    shutil.copytree(hybrid_folder(name), tmp_path / "m")
    save_file(dict(state), tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        load_model(folder, torch.float32, CPU).model
        for folder in (tmp_path / "m", hybrid_folder(name))
    )
    assert_same_weights(dict(found.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_of_bfloat16_stay(name: str, tmp_path: Path) -> None:
    """Also of tiny weights of norms, and of factors that Megatron stores less 1."""
    model = make_hybrid(name).to(torch.bfloat16)
    for key, parameter in model.named_parameters():
        if "norm" in key:
            scale = 2.0 ** -torch.arange(parameter.numel()).remainder(12)
            parameter.data.mul_(scale)
    model.save_pretrained(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = load_file(tmp_path / "m" / "model.safetensors")
    assert found.keys() == expected.keys()
    wide = {key for key in expected if found[key].dtype == torch.float32}
    assert wide == {key for key in expected if key.endswith(("A_log", "linear_attn.norm.weight"))}
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor.to(found[key].dtype)), key


def test_layers_by_an_interval(hybrid_folder: Any, tmp_path: Path) -> None:
    """Older configurations do not list them."""
    changes: dict[str, Any] = {"full_attention_interval": 2, "layer_types": "absent"}
    folder = edited(hybrid_folder("qwen3.5"), tmp_path / "m", **changes)
    assert open_model(folder).architecture.pattern == "G-*-G-*-"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma = False"),
        ({"pattern": "GG*G-**-"}, "layer_types = "),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function = 'sigmoid'"),
    ],
)
def test_what_has_no_folder(change: dict[str, Any], message: str, hybrid_folder: Any) -> None:
    """A model that transformers' class would compute otherwise is not written as if it were it."""
    architecture = replace(open_model(hybrid_folder("qwen3.5")).architecture, **change)
    with pytest.raises(CheckpointError, match=message):
        write_config(architecture, "float32")
