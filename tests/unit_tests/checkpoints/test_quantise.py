"""`convert` to FP8: tensors by the formulas of `tests/support/quantised_folders.py`, what
transformers and our reader make of them, and what is refused and told."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.cli.main import main
from megatron_async.errors import ConfigurationError
from tests.support.quantised_folders import MODEL, Format, fp8, is_matrix, quantised_folder
from tests.unit_tests.checkpoints.hybrid_families import (
    assert_same_weights,
    edited,
    huggingface_state,
)

CPU = torch.device("cpu")
BLOCKS = Format({}, lambda w: fp8(w, 128, 128, ".weight_scale_inv"))
CHANNELS = Format({}, lambda w: fp8(w, 1, 0, ".weight_scale"))
DENSE = "dummy:qwen3:layers=1,hidden=256,heads=4,groups=2,head=64,ffn=384,vocab=64"
EXPERTS = (
    "dummy:qwen3_moe:layers=2,hidden=128,heads=2,groups=1,head=128,ffn=256,vocab=64,experts=3,"
    "topk=2"
)


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Linear layers and experts, but for the rows of Gated DeltaNet that make its step sizes."""
    more = (".w1.weight", ".w2.weight", ".w3.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    return is_matrix(name, tensor) or name.endswith((*more, "in_proj_qkvz.weight"))


def state_of(folder: Path) -> dict[str, Tensor]:
    loaded = load_model(folder, torch.float32, CPU)
    return huggingface_state(loaded.model, loaded.architecture)


@pytest.mark.parametrize(
    ("family", "kind", "form"),
    [
        (DENSE, "fp8", BLOCKS),
        (EXPERTS, "fp8", BLOCKS),
        (DENSE, "fp8-channel", CHANNELS),
        ("qwen3-tied", "fp8-channel", CHANNELS),
        ("mixtral", "fp8-channel", CHANNELS),
        ("nemotron-3", "fp8-channel", CHANNELS),
        ("bamba", "fp8-channel", CHANNELS),
        ("qwen3-next", "fp8-channel", CHANNELS),
        ("qwen3.5-moe", "fp8-channel", CHANNELS),
    ],
)
def test_tensors_are_those_of_the_formulas(
    family: str, kind: str, form: Format, family_folder, hybrid_folder, tmp_path: Path
) -> None:
    """Which are quantised, their codes and scales, and what our reader makes of them."""
    plain = tmp_path / "plain"
    if family.startswith("dummy:"):
        convert(family, plain, to="huggingface", dtype="float32")
    else:
        source = (family_folder if family in ("qwen3-tied", "mixtral") else hybrid_folder)(family)
        convert(source, plain, to="huggingface")
    expected = quantised_folder(plain, tmp_path / "expected", form, is_quantised)
    convert(plain, tmp_path / "m", quantization=kind)
    stored = load_file(tmp_path / "m" / MODEL)
    assert any(name.endswith(("_scale", "_scale_inv")) for name in stored)
    assert_same_weights(stored, load_file(expected / MODEL))
    assert_same_weights(state_of(tmp_path / "m"), load_file(tmp_path / "expected-plain" / MODEL))
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    listed = config["modules_to_not_convert" if kind == "fp8" else "ignore"]
    modules = {name.removesuffix(".weight") for name, t in stored.items() if t.dim() > 1}
    quantised = {name for name in modules if f"{name}.weight_scale" in stored}
    quantised |= {name for name in modules if f"{name}.weight_scale_inv" in stored}
    modules = {name for name in modules if not name.endswith(("_scale", "_scale_inv"))}
    assert {*listed} == (modules - quantised) | {"lm_head"}


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
def test_transformers_has_the_same_weights(shape: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(shape, tmp_path / "m", dtype="float32", quantization="fp8")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    found, ours = dict(theirs.named_parameters()), state_of(tmp_path / "m")
    for layer in range(theirs.config.num_hidden_layers):
        base = f"model.layers.{layer}.mlp.experts"
        if f"{base}.gate_up_proj" in found:
            both, down = found.pop(f"{base}.gate_up_proj"), found.pop(f"{base}.down_proj")
            for expert in range(len(both)):
                gate, up = both[expert].chunk(2)
                parts = ("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])
                found |= {f"{base}.{expert}.{name}.weight": part for name, part in parts}
    found.pop("lm_head.weight", None)
    ours.pop("lm_head.weight", None)
    assert_same_weights(found, ours)


def test_it_is_told_by_info_and_is_half_as_large(capsys, tmp_path: Path) -> None:
    target = tmp_path / "m"
    shape = "dummy:qwen3:layers=2,hidden=512,heads=8,groups=8,head=64,ffn=2048,vocab=64"
    convert(shape, tmp_path / "plain", to="huggingface", dtype="bfloat16")
    arguments = ["convert", str(tmp_path / "plain"), str(target), "--quantization", "fp8"]
    assert main([*arguments, "--no-progress"]) == 0
    assert f"wrote {target} (fp8)" in capsys.readouterr().out
    info = model_info(target)
    assert info.quantised is not None
    assert "FP8, scales: blocks of 128 x 128: 14 weights" in format_info(info)
    sizes = [(folder / MODEL).stat().st_size for folder in (tmp_path / "plain", target)]
    assert sizes[1] < 0.52 * sizes[0]
    assert open_model(target).dtype == torch.bfloat16


def test_shards_have_codes_beside_their_scales(tmp_path: Path) -> None:
    """And the index counts the bytes that are written."""
    loaded = load_model(EXPERTS, torch.bfloat16, CPU)
    model, architecture = loaded.model, loaded.architecture
    for bytes_of_shard, folder in ((10**9, tmp_path / "one"), (200_000, tmp_path / "many")):
        save_huggingface(
            model, architecture, None, folder, shard_bytes=bytes_of_shard, quantization="fp8"
        )
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    stored = load_file(tmp_path / "one" / MODEL)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    found = {
        n: t for f in (tmp_path / "many").glob("*.safetensors") for n, t in load_file(f).items()
    }
    assert_same_weights(found, stored)
    of = index["weight_map"]
    assert len({*of.values()}) > 2
    assert all(of[n] == of[n.removesuffix("_scale_inv")] for n in of)


def test_zeros_and_tiny_numbers(tmp_path: Path) -> None:
    """A block of zeros has a scale that divides; the smallest numbers have no smaller scale."""
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    tensors = load_file(tmp_path / "plain" / MODEL)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][:128] = 0
    tensors[name][128:256] = 1e-44
    save_file(tensors, tmp_path / "plain" / MODEL, metadata={"format": "pt"})
    convert(tmp_path / "plain", tmp_path / "m", quantization="fp8")
    found = state_of(tmp_path / "m")[name]
    assert not found[:256].any()
    torch.testing.assert_close(found[256:], tensors[name][256:], rtol=0.0625, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_finite_numbers(value: float, tmp_path: Path) -> None:
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    tensors = load_file(tmp_path / "plain" / MODEL)
    tensors["model.layers.0.mlp.up_proj.weight"][5, 7] = value
    save_file(tensors, tmp_path / "plain" / MODEL, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight' has values that are no finite"):
        convert(tmp_path / "plain", tmp_path / "m", quantization="fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama-tied", {"quantization": "fp8"}, r"proj.weight' of shape \[64, 64\] .*fp8-channel"),
        ("granite-moe", {"quantization": "fp8-channel"}, "input_linear.weight' .* all experts"),
        ("llama-tied", {"quantization": "int8"}, "'int8' is not written: use one of fp8, fp8-ch"),
        ("llama-tied", {"quantization": "fp8", "to": "torch_dist"}, "use to='huggingface'"),
    ],
)
def test_refused_before_a_weight_is_read(
    family: str,
    options: dict[str, str],
    message: str,
    family_folder: Callable[[str], Path],
    hybrid_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = open_model((hybrid_folder if "granite" in family else family_folder)(family))
    monkeypatch.setattr(type(source), "load_weights", None)
    with pytest.raises(ConfigurationError, match=message):
        convert(source, tmp_path / "t", **options)
    assert not any(tmp_path.iterdir())


def test_the_command_refuses_so_too(family_folder, capsys, tmp_path: Path) -> None:
    source, target = str(family_folder("llama-tied")), str(tmp_path / "t")
    assert main(["convert", source, target, "--quantization", "fp8"]) == 2
    assert "use --quantization fp8-channel (a scale" in capsys.readouterr().err
    assert main(["convert", source, target, "--quantization", "fp8", "--to", "torch_dist"]) == 2
    assert "use --to huggingface, or" in capsys.readouterr().err
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("mine")
    assert main(["convert", source, target, "--quantization", "fp8-channel"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["mine.txt"]


def test_a_second_rounding_is_told(
    family_folder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A quantised source is decoded first; a folder that says so and holds none is plain."""
    plain = family_folder("llama-tied")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with caplog.at_level(logging.WARNING, "megatron_async"):
        convert(edited(plain, tmp_path / "s", quantization_config=said), tmp_path / "a",
                quantization="fp8-channel")  # fmt: skip
        assert "rounded once more" not in caplog.text
        convert(tmp_path / "a", tmp_path / "b", quantization="fp8-channel")
        assert "scales: one an output: 21 weights): its weights are rounded once" in caplog.text
    first, second = (load_file(tmp_path / each / MODEL) for each in "ab")
    codes = [name for name in first if f"{name}_scale" in first]
    assert all(torch.equal(first[name].float(), second[name].float()) for name in codes)
