"""Folders of training runs: what is beside the weights, iterations, and other formats."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.cli import main as cli
from tests.unit_tests.checkpoints.checkpoint_models import assert_same_weights
from tests.unit_tests.checkpoints.training_checkpoints import parsed_args, save_run, trained_model

CPU = torch.device("cpu")
TRACKER = "latest_checkpointed_iteration.txt"
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32)"


def training_state(model: Any) -> dict[str, Any]:
    """Adam's state after a step by Megatron's own conversion, and the rest of a training state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(value)
    state: Any = optimizer.state_dict()
    sharded = get_param_id_to_sharded_param_map(model.sharded_state_dict(), model.parameters())
    optim_state_to_sharding_state(state, sharded, exclude_keys="step")
    flat = torch.arange(1000.0)
    buckets = ShardedTensor.from_rank_offsets(f"{BUCKET}.bucket_idx_0.exp_avg", flat, replica_id=0)
    random = ShardedObject("rng_state", [{"np_rng_state": pickle.dumps(1)}], (1, 1), (0, 0))
    return {
        "optimizer": {**state, "param_state": buckets},
        "rng_state": random,
        "opt_param_scheduler": {"max_lr": 3e-4, "lr_decay_style": "cosine", "num_steps": 56},
        "rerun_state_machine": {"mode": "disabled"},
    }


def test_optimizer_states_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their bytes are overwritten, and nobody notices. Other tensors are named."""
    args = parsed_args()
    model = trained_model(args)
    save_run(model, tmp_path / "bare", args)
    save_run(model, tmp_path / "whole", args, **training_state(model))
    index = pickle.loads((tmp_path / "whole" / ".metadata").read_bytes())
    keys = {key.fqn for key in index.storage_data}
    beside = {key for key in keys if key.startswith(("optimizer", "rng_state"))}
    assert any(key.startswith("optimizer.state.exp_avg.decoder") for key in beside)
    assert any(key.startswith(BUCKET) for key in beside)
    for key, place in index.storage_data.items():
        if key.fqn in beside:
            with (tmp_path / "whole" / place.relative_path).open("r+b") as file:
                file.seek(place.offset)
                file.write(b"\xff" * place.length)
    bare, whole = (load_model(tmp_path / name, torch.float32, CPU) for name in ("bare", "whole"))
    assert whole.architecture == bare.architecture
    expected = dict(bare.model.named_parameters())
    assert_same_weights(dict(whole.model.named_parameters()), expected)
    assert not [record for record in caplog.records if record.name == "megatron_async"]
    other = ShardedTensor.from_rank_offsets("teacher.head.weight", torch.ones(2), replica_id=0)
    save_run(model, tmp_path / "more", args, teacher=other)
    load_model(tmp_path / "more", torch.float32, CPU)
    assert "tensor 'teacher.head.weight', one of 1 that are no part of the model" in caplog.text


def test_a_config_without_weights_beside_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "m"))
    (copy / "config.json").write_text("{}")
    assert open_model(copy).format == "torch_dist"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "iter_0000123"
    args = parsed_args()
    save_run(trained_model(args), folder, args)
    return folder


@pytest.fixture
def run_folder(saved: Path, tmp_path: Path) -> Path:
    """A training folder with two iterations and a tracker."""
    for name in ("iter_0000123", "release"):
        shutil.copytree(saved, tmp_path / name)
    (tmp_path / TRACKER).write_text("123\n")
    return tmp_path


@pytest.mark.parametrize("tracked", ["123", "release", " 123 \n", "0000123"])
def test_root_and_iteration_both_open(
    tracked: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / TRACKER).write_text(tracked)
    for folder in (run_folder, run_folder / "iter_0000123", run_folder / "release"):
        assert open_model(folder).architecture.num_layers == 2
    expected = "release" if tracked == "release" else "iter_0000123"
    assert Path(vars(open_model(run_folder))["folder"]).name == expected
    assert cli.main(["info", str(run_folder), "--device", "cpu"]) == 0
    assert "llama, 2 layers" in capsys.readouterr().out
    assert (
        cli.main(["convert", str(run_folder), str(run_folder / "out"), "--to", "huggingface"]) == 0
    )
    assert open_model(run_folder / "out").format == "huggingface"


def _track(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / TRACKER).write_text(text)


def _legacy(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000123")
    ranks = folder / "iter_0000123" / "mp_rank_00_000"
    ranks.mkdir(parents=True)
    (ranks / "model_optim_rng.pt").write_bytes(b"")


def _backend(name: str) -> Callable[[Path], Any]:
    content = json.dumps({"sharded_backend": name, "sharded_backend_version": 1})
    return lambda folder: (folder / "iter_0000123" / "metadata.json").write_text(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _track("500"),
            r"names iteration '500', but .*iter_0000500 is not there.*iter_0000123, rel",
        ),
        (_track(""), r"'' is neither the number of an iteration nor 'release'.*iter_0000123"),
        (_track("latest"), r"'latest' is neither the number"),
        (lambda f: (f / TRACKER).unlink(), r"has no latest_.*there are: iter_0000123, release"),
        (_legacy, r"mp_rank_00_000, so its format is 'torch' .*--ckpt-convert-format torch_dist"),
        (_backend("zarr"), r"sharded_backend = 'zarr' is not supported \(only 'torch_dist'\)"),
        (
            lambda f: (f / "iter_0000123" / "metadata.json").unlink(),
            r"format is 'fsdp_dtensor' or 'torch_dcp'.*--ckpt-format torch_dist",
        ),
        (
            lambda f: [path.unlink() for path in (f / "iter_0000123").iterdir()],
            r"iter_0000123: holds no checkpoint \(metadata.json is missing\)",
        ),
    ],
    ids=["absent", "empty", "word", "no-tracker", "legacy", "zarr", "fsdp", "empty-folder"],
)
def test_folders_that_cannot_be_read(
    change: Callable[[Path], Any], message: str, run_folder: Path
) -> None:
    change(run_folder)
    with pytest.raises(CheckpointError, match=message):
        open_model(run_folder)


def test_a_legacy_iteration_by_its_own_path(run_folder: Path) -> None:
    _legacy(run_folder)
    with pytest.raises(CheckpointError, match="its format is 'torch'"):
        open_model(run_folder / "iter_0000123")


def test_a_tokenizer_of_the_run_serves_all_its_iterations(run_folder: Path) -> None:
    folders = (run_folder, run_folder / "release")
    assert [open_model(folder).tokenizer for folder in folders] == [None, None]
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    tokenizer.save(run_folder)
    for folder in folders:
        found = open_model(folder)
        assert found.tokenizer is not None
        assert found.tokenizer.eos_ids == found.architecture.eos_token_ids == tokenizer.eos_ids
