import re
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_async.checkpoints import CheckpointError, LoadedModel, load_model, open_model
from megatron_async.checkpoints import convert as convert_module
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import HuggingFaceSource, save_huggingface
from megatron_async.checkpoints.huggingface_config import write_config
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.cli.main import main
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from tests.unit_tests.checkpoints.hybrid_families import assert_same_weights, huggingface_state

CPU = torch.device("cpu")


def test_demo_model_becomes_a_folder_that_transformers_runs(
    smollm2: LoadedModel, transformers_smollm2: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert("smollm2", tmp_path / "hf", to="huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, transformers_smollm2(ids).logits)
    assert model.generation_config.eos_token_id == 2
    state = huggingface_state(smollm2.model, smollm2.architecture)
    assert_same_weights(load_file(tmp_path / "hf" / "model.safetensors"), state)
    opened = open_model(tmp_path / "hf")
    assert opened.architecture == smollm2.architecture
    assert smollm2.tokenizer is not None
    assert opened.tokenizer is not None
    assert opened.tokenizer.chat_template == smollm2.tokenizer.chat_template


def test_dtype_is_converted_when_asked(family_folder: Callable[[str], Path], tmp_path):
    folder = family_folder("qwen2")
    convert(folder, tmp_path / "m", dtype="bfloat16")
    assert open_model(tmp_path / "m").dtype == torch.bfloat16
    loaded = load_model(tmp_path / "m", torch.bfloat16, CPU)
    expected = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert_same_weights(huggingface_state(loaded.model, loaded.architecture), expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "torch_dist"}, "MiB of the disk are free"),
        ({"to": "huggingface"}, "too large"),
        ({"quantization": "fp8-channel"}, "too large"),
    ],
)
def test_a_full_disk_is_one_clear_error(options: dict[str, str], words, family_folder, tmp_path):
    """A limit of the file size stands for the disk: torch raises no `Exception` then."""
    source = open_model(family_folder("llama-tied"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write .*m: .*{words}"):
            convert(source, tmp_path / "m", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_targets_are_not_overwritten_unasked(family_folder: Callable[[str], Path], tmp_path):
    source, target = family_folder("llama-tied"), tmp_path / "t"
    target.mkdir()
    convert(source, target)  # empty: fine
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(source, target, to="huggingface")
    convert(target, target, to="huggingface", overwrite=True)  # even onto itself
    assert open_model(target).format == "huggingface"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t"]
    (target / "config.json").unlink()
    with pytest.raises(CheckpointError, match="something other than a model"):
        convert(source, target, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        convert(source, tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_the_target_as_it_was(
    error: BaseException,
    family_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = family_folder("llama-tied"), tmp_path / "t"
    convert(source, target)
    before = {p.name: p.read_bytes() for p in target.iterdir()}

    def interrupted(model: object, architecture: object, tokenizer: object, folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    monkeypatch.setattr(convert_module, "save_torch_dist", interrupted, raising=True)
    with pytest.raises((KeyboardInterrupt, CheckpointError), match=r"^$|No space left"):
        convert(source, target, overwrite=True)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"to": "gguf"}, "to='gguf'.*torch_dist, huggingface"), ({"dtype": "int8"}, "dtype 'int8'")],
)
def test_bad_options(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        convert("dummy:tiny", tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M-*-", r"a llama model with pattern = 'M-\*-' has no Hugging Face form"),
        ("*--*", r"pattern = '\*--\*' has no Hugging Face form"),
        ("**", r"pattern = '\*\*' has no Hugging Face form"),
    ],
)
def test_layers_that_their_family_does_not_know(
    pattern: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused by their pattern, with a remedy, before a weight is read or a file written."""
    architecture = replace(DUMMY_SHAPES["tiny"], pattern=pattern)
    monkeypatch.setitem(DUMMY_SHAPES, "other", architecture)
    source = open_model("dummy:other")
    monkeypatch.setattr(type(source), "load_weights", None)
    with pytest.raises(CheckpointError, match=message + ".*convert to torch_dist instead"):
        convert(source, tmp_path / "t", to="huggingface")
    arguments = ["convert", "dummy:other", str(tmp_path / "t"), "--to", "huggingface"]
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not any(tmp_path.iterdir())


def test_every_shape_that_is_served_has_its_form() -> None:
    for architecture in DUMMY_SHAPES.values():
        write_config(architecture.without_mtp, "bfloat16")


def test_a_folder_is_read_weight_by_weight(
    family_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break it: read all weights before the first is written. What has changed meanwhile is
    refused, and nothing is written."""
    source = open_model(family_folder("qwen2"))
    assert isinstance(source, HuggingFaceSource)
    a, shard, written = source.architecture, Shard(), list[int]()
    model = build_model(a, torch.bfloat16, torch.device("meta"))
    with source.reading(shard) as read:

        def noted(name: str, into: torch.Tensor) -> None:
            written.append(len(list(tmp_path.glob("model-*"))))
            read(name, into)

        save_huggingface(model, a, None, tmp_path, shard_bytes=1, read=noted)
    assert written == list(range(len(list(weights(a)))))
    convert(source, tmp_path / "whole", to="huggingface", dtype="bfloat16")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    parts = {n: t for file in tmp_path.glob("model-*") for n, t in load_file(file).items()}
    assert_same_weights(parts, whole)

    def changed() -> None:
        raise CheckpointError("it was written to")

    monkeypatch.setattr(source, "check_unchanged", changed)
    with pytest.raises(CheckpointError, match="it was written to"):
        convert(source, tmp_path / "changed", to="huggingface")
    assert not (tmp_path / "changed").exists()
