"""No tensor of a folder is dropped without a comparison or a word, and no file without a name."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.draft_layer import WithDraftLayer, save_draft_layer
from megatron_async.checkpoints.mapping import Shard, weights
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import (
    make_hybrid,
    their_logits,
    without_least_step,
)
from tests.unit_tests.checkpoints.test_delta_folders import with_vision

CPU = torch.device("cpu")
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS = [1, 5, 23, 70, 99, 3, 64]


@pytest.fixture
def llama(family_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(family_folder("llama-tied"), tmp_path / "llama"))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any], **config: Any) -> None:
    tensors = load_file(folder / MODEL)
    edit(tensors)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def warnings_of(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "megatron_async"):
        load_model(folder, torch.float32, CPU)
    return [record.getMessage() for record in caplog.records]


def check_logits(folder: Path) -> None:
    """Logits of the folder are those of transformers, whatever it makes of the head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_vision = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    theirs = without_least_step(kind.from_pretrained(folder).eval())
    expected = their_logits(theirs, TOKENS)
    ours = load_model(folder, torch.float32, CPU)
    assert not ours.architecture.tie_word_embeddings
    found = whole_logits(ours.model, TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def add_head(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors["lm_head.weight"] = torch.randn(128, 64, generator=generator)


@pytest.mark.parametrize("family", ["llama", "nemotron-h", "qwen3.5 outside", "qwen3.5 inside"])
def test_a_stored_head_is_used_though_the_configuration_ties_it(
    family: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "m"
    changes: dict[str, Any] = {"tie_word_embeddings": True}
    if family == "llama":
        folder = llama
    elif family == "nemotron-h":
        make_hybrid("nemotron-h").save_pretrained(folder)
    else:
        with_vision("qwen3.5", folder)
        config = json.loads((folder / "config.json").read_text())
        inside = family.endswith("inside")
        text = config["text_config"] | {"tie_word_embeddings": inside}
        changes = {"text_config": text, "tie_word_embeddings": not inside}
    change(folder, add_head, **changes)
    said = [text for text in warnings_of(folder, caplog) if "tie_word_embeddings" in text]
    # Where the model as a whole says that nothing is tied, there is nothing to warn of.
    assert len(said) == (not family.endswith("inside"))
    assert all("'lm_head.weight'" in text and "config.json" in text for text in said)
    check_logits(folder)


def test_a_head_that_is_the_embedding_is_read_once(llama: Path, caplog):
    plain = load_file(llama / MODEL)["model.embed_tokens.weight"]
    change(llama, lambda t: t.update({"lm_head.weight": plain.clone()}))
    assert warnings_of(llama, caplog) == []
    assert open_model(llama).architecture.tie_word_embeddings
    # With the head alone, that is the embedding, as in transformers.
    change(llama, lambda t: t.pop("model.embed_tokens.weight"))
    assert warnings_of(llama, caplog) == []
    found = load_model(llama, torch.float32, CPU).model.state_dict()
    assert torch.equal(found["embedding.word_embeddings.weight"], plain)
    # One value is enough to tell them apart.
    other = plain.clone()
    other[-1, -1] += 1
    change(llama, lambda t: t.update({"model.embed_tokens.weight": other}))
    assert not open_model(llama).architecture.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_stored_table_of_rope_is_compared(dtype: torch.dtype, llama: Path, caplog):
    table = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(llama, lambda t: t.update({name: table.to(dtype)}))
    assert warnings_of(llama, caplog) == []
    change(llama, lambda t: t.update({name: (table * 1.5).to(dtype)}))
    (said,) = warnings_of(llama, caplog)
    assert name in said
    assert "config.json" in said


def shard(folder: Path, copies: dict[str, Tensor], names: dict[str, str] | None = None) -> None:
    """Two shards and an index; `copies` are in the second shard though the first has them too."""
    tensors = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    first = {name: t for name, t in tensors.items() if "layers.2" not in name}
    files = {"a.safetensors": first, "b.safetensors": {**tensors, **copies}.copy()}
    for name in first.keys() - copies.keys():
        del files["b.safetensors"][name]
    for file, content in files.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    places = {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places | (names or {})}))


K = "model.layers.1.self_attn.k_proj.weight"


def test_a_tensor_in_two_shards(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = load_file(llama / MODEL)
    twin = shutil.copytree(llama, llama.parent / "twin")
    shard(llama, {K: plain[K].clone()})
    assert warnings_of(llama, caplog) == []
    shard(twin, {K: plain[K] + 1})
    with pytest.raises(CheckpointError, match=f"a.safetensors and b.safetensors .* {K!r}"):
        load_model(twin, torch.float32, CPU)


def test_a_tensor_that_the_index_does_not_name_is_part_of_the_model(llama: Path) -> None:
    shard(llama, {"odd": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"tensor 'odd' .* is not part of"):
        load_model(llama, torch.float32, CPU)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", None, 7, ["a"], "a\0b"],
)
def test_an_index_that_names_files_elsewhere(name: Any, llama: Path) -> None:
    shard(llama, {}, {K: name})
    with pytest.raises(CheckpointError, match=f"{INDEX}: tensor '{K}' is said to be in"):
        load_model(llama, torch.float32, CPU)


def test_files_of_a_folder_may_be_links(llama: Path) -> None:
    """Links of Hugging Face's cache lead out of the folder."""
    blobs = llama.parent / "blobs"
    blobs.mkdir()
    shard(llama, {})
    for number, file in enumerate(sorted(llama.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(Path("..") / "blobs" / str(number))
    load_model(llama, torch.float32, CPU)


@pytest.mark.parametrize(
    "names",
    [
        ["pytorch_model.bin"],
        ["consolidated.safetensors"],
        ["model-q8_0.gguf"],
        ["latest_checkpointed_iteration.txt"],
        ["model-00001-of-00002.safetensors", INDEX],
        ["pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "tf_model.h5"],
    ],
)
def test_other_weights_beside_those_that_are_read(names: list[str], llama: Path, caplog):
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (llama / name).write_bytes(b"of a trainer")
    assert warnings_of(llama, caplog) == []
    for name in names:
        other = {"weight_map": {K: "model-00001-of-00002.safetensors"}}
        (llama / name).write_text(json.dumps(other) if name == INDEX else "x")
    (said,) = warnings_of(llama, caplog)
    assert "read from model.safetensors" in said
    told = "a Megatron checkpoint" if names[0].endswith(".txt") else names[0]
    assert told in said
    assert all(name in said for name in names[1:])


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    with_vision("qwen3.5", tmp_path / "m")
    inside = "model.language_model.norm.weight"
    change(tmp_path / "m", lambda t: t.update({"model.norm.weight": t[inside].clone()}))
    with pytest.raises(
        CheckpointError, match=r"norm.weight' and 'model\..*norm.weight' are the same"
    ):
        load_model(tmp_path / "m", torch.float32, CPU)


def test_an_adapter_is_refused(llama: Path) -> None:
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: .* merge it"):
        open_model(llama)


def test_a_draft_layer_of_another_form_or_that_changes_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    """Codes of FP8 and whole numbers are no weights by themselves."""
    file, shard = tmp_path / "draft.safetensors", Shard(with_mtp=True)
    save_draft_layer({}, "*-", {}, file)
    source = WithDraftLayer(open_model(llama), file)
    wanted = list(weights(source.architecture, shard))
    held = {weight.name: torch.empty(weight.shape) for weight in wanted}
    layer = {
        name: torch.rand(shape)
        for weight in wanted
        if weight.stored.startswith("mtp")
        for name, shape in weight.parts.items()
    }
    odd = min(layer)
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bool):
        save_draft_layer(layer | {odd: layer[odd].to(dtype)}, "*-", {}, file)
        with pytest.raises(CheckpointError, match=rf"{odd}' is stored as .*, which is not read"):
            WithDraftLayer(open_model(llama), file).load_into(held, shard)
    save_draft_layer(layer, "*-", {}, file)
    WithDraftLayer(open_model(llama), file).load_into(held, shard)
    for each in (file, llama / MODEL):
        source = WithDraftLayer(open_model(llama), file)
        source.check_stored(with_mtp=True)
        with each.open("ab") as stream:  # behind its tensors
            stream.write(b"x")
        with pytest.raises(CheckpointError, match=f"{each.name}: was written to while"):
            source.load_into(held, shard)
        each.write_bytes(each.read_bytes()[:-1])
