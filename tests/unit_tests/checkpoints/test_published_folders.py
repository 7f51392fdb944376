"""Folders with published names, shapes and shards: what they are read as, and what is refused."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.mapping import weights
from megatron_async.checkpoints.source import model_parameters, named_tensors
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import their_logits, without_least_step
from tests.unit_tests.checkpoints.published_folders import (
    GRANITE,
    NANO,
    NEMOTRON_H_8B,
    cut,
    published_tensors,
    values_of,
    with_names,
    write_folder,
)

CPU = torch.device("cpu")
FULL_MODELS = pytest.mark.skipif(
    not os.environ.get("MEGATRON_ASYNC_FULL_MODELS"),
    reason="takes minutes and 8 GB: set MEGATRON_ASYNC_FULL_MODELS=1",
)
CONFIGS = {
    "nemotron-3-nano-30b": NANO,
    "nemotron-3-nano-30b, layers by name": with_names(NANO),
    "nemotron-h-8b": NEMOTRON_H_8B,
    "nemotron-h-8b, layers by name": with_names(NEMOTRON_H_8B),
    "granite-4.0-h-350m": GRANITE,
}
CUT = {
    # One layer of each kind that the model has, each as large as it is.
    "nemotron-3-nano-30b": cut(NANO, "ME*", experts=8),
    "nemotron-h-8b": cut(NEMOTRON_H_8B, "M-*"),
}
TOKENS = torch.randint(0, 512, (20,), generator=torch.Generator().manual_seed(4)).tolist()


def few_rows(name: str, shape: tuple[int, ...]) -> Tensor:
    """512 rows of a vocabulary; all of anything else."""
    is_vocabulary = "embed" in name or name.startswith("lm_head")
    return values_of(name, (512, *shape[1:]) if is_vocabulary else shape)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_is_a_published_tensor(name: str, tmp_path: Path) -> None:
    """Weights of whole models, in shards of 5 GB as they are published, whose numbers are holes."""
    config, shape = CONFIGS[name], name.partition(",")[0]
    folder = write_folder(config, tmp_path / "model")
    source = open_model(folder)
    expected = replace(
        DUMMY_SHAPES[shape],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=(config["eos_token_id"],),
    )
    assert source.architecture == expected
    assert source.dtype == torch.bfloat16
    asked = {part: size for weight in source.checked_weights for part, size in weight.parts.items()}
    assert asked == published_tensors(config)
    assert source.architecture.num_parameters == sum(
        torch.Size(size).numel() for size in asked.values()
    )
    # And every parameter of the model is one of these weights.
    model = build_model(source.architecture, torch.bfloat16, torch.device("meta"))
    found = model_parameters(named_tensors(model), list(weights(source.architecture)))
    assert sum(parameter.numel() for parameter in found.values()) == expected.num_parameters


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=FULL_MODELS if name == "nemotron-h-8b" else ()) for name in CUT],
)  # the other one has all that this one has, and experts
def test_layers_of_full_size_are_read_into_their_places(name: str, tmp_path: Path) -> None:
    folder = write_folder(CUT[name], tmp_path / "model", 10**9, few_rows)
    assert len(list(folder.glob("*.safetensors"))) > 1
    source = open_model(folder)
    model = build_model(source.architecture, torch.bfloat16, CPU)
    source.load_weights(model)
    shapes = published_tensors(CUT[name])

    def stored(name: str) -> Tensor:
        return few_rows("backbone." + name, shapes["backbone." + name])

    found = {key: parameter.detach() for key, parameter in model.named_parameters()}
    assert torch.equal(found["embedding.word_embeddings.weight"][:512], stored("embeddings.weight"))
    assert not found["embedding.word_embeddings.weight"][512:].any()
    ours, theirs = "decoder.layers.0.mixer.", "layers.0.mixer."
    for part in ("in_proj.weight", "out_proj.weight", "norm.weight", "dt_bias"):
        assert torch.equal(found[ours + part], stored(theirs + part))
    assert torch.equal(found[ours + "conv1d_weight"], stored(theirs + "conv1d.weight"))
    for part in ("A_log", "D"):
        assert found[ours + part].dtype == torch.float32
        assert torch.equal(found[ours + part], stored(theirs + part).float())
    # Attention: of each group its query heads, its key, its value.
    parts = [stored(f"layers.2.mixer.{part}_proj.weight") for part in "qkv"]
    groups = source.architecture.num_query_groups
    rows = [part.unflatten(0, (groups, -1)) for part in parts]
    expected = torch.cat(rows, 1).flatten(0, 1)
    assert torch.equal(found["decoder.layers.2.self_attention.linear_qkv.weight"], expected)
    mlp = "decoder.layers.1.mlp."
    if source.architecture.num_moe_experts:
        bias = found[mlp + "router.expert_bias"]
        assert bias.dtype == torch.float32
        assert torch.equal(bias, stored("layers.1.mixer.gate.e_score_correction_bias").float())
        assert torch.equal(found[mlp + "router.weight"], stored("layers.1.mixer.gate.weight"))
        for expert in (0, 5, 7):
            for fc, part in (("fc1", "up"), ("fc2", "down")):
                weight = found[f"{mlp}experts.linear_{fc}.weight"][expert]
                name_of_part = f"layers.1.mixer.experts.{expert}.{part}_proj.weight"
                assert torch.equal(weight, stored(name_of_part))
    prefix, theirs = (
        (mlp + "shared_experts.", "layers.1.mixer.shared_experts.")
        if source.architecture.num_moe_experts
        else (mlp, "layers.1.mixer.")
    )
    for fc, part in (("fc1", "up"), ("fc2", "down")):
        weight = found[f"{prefix}linear_{fc}.weight"]
        assert torch.equal(weight, stored(f"{theirs}{part}_proj.weight"))


@FULL_MODELS
@pytest.mark.parametrize("name", CUT)
def test_layers_of_full_size_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    check_against_transformers(write_folder(CUT[name], tmp_path / "model", 10**9, few_rows))


@FULL_MODELS
def test_a_whole_model_says_what_transformers_says(tmp_path: Path) -> None:
    folder = write_folder(GRANITE, tmp_path / "model", 2 * 10**8, values_of)
    assert len(list(folder.glob("*.safetensors"))) > 1
    check_against_transformers(folder)


def check_against_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = their_logits(without_least_step(theirs).eval(), TOKENS)
    del theirs
    found = whole_logits(load_model(folder, torch.float32, CPU).model, TOKENS)
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
