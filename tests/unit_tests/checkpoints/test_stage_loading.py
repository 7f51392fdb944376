"""A pipeline stage loads its own layers of a checkpoint, whatever the format."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.pipeline import EMBEDDING, OUTPUT, stage_of
from tests.support.ranks import run_ranks

Weights = dict[str, torch.Tensor]


def load(folders: list[str], stages: int) -> list[Weights]:
    """This rank's weights of models, by their names in the whole model."""
    found = []
    for folder in folders:
        source, sizes = open_model(folder), ParallelSizes(pipeline_model_parallel=stages)
        model = build_model(source.architecture, torch.float32, torch.device("cpu"), sizes=sizes)
        source.load_weights(model)
        stage = stage_of(model.config)
        held = model.named_parameters()
        found.append({stage.global_name(n): p.detach().clone() for n, p in held})
    return found


def load_bytes(folders: list[str]) -> list[dict[str, bytes]]:
    """The same of one of two stages, as bytes: tensors are shared memory of a process that ends."""
    return [{n: p.numpy().tobytes() for n, p in held.items()} for held in load(folders, 2)]


def test_stages_load_their_layers_alone(tmp_path: Path) -> None:
    folders = [str(tmp_path / to) for to in ("huggingface", "torch_dist")]
    for folder in folders:
        convert("dummy:tiny", Path(folder), to=Path(folder).name)
    first, last = run_ranks(2, load_bytes, folders)
    for whole, *stages in zip(load(folders, 1), first, last, strict=True):
        wanted = {name: p.numpy().tobytes() for name, p in whole.items()}
        assert stages[1].pop(OUTPUT) == wanted[EMBEDDING], "tied: the last stage has a copy"
        assert not stages[0].keys() & stages[1].keys()
        assert stages[0] | stages[1] == wanted
