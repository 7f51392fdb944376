"""Mixers of recurrent layers over ranks, and read by Megatron: Mamba-2's and Gated DeltaNet's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.models.hybrid import build_model, init_dummy_weights
from megatron_async.models.parallel_state import ParallelSizes
from tests.support.ranks import run_ranks
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import save_hybrid

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 128, (21,), generator=torch.Generator().manual_seed(4)).tolist()
FAMILIES = ("nemotron-3", "granite-moe", "qwen3-next", "qwen3.5")
"""Mamba-2 with two groups, and with one that both ranks hold; Gated DeltaNet with a key head's rows
of `in_proj` together, and in strips; the latter with experts, and without."""
TENSOR, EXPERTS = {"tensor_model_parallel": 2}, {"expert_model_parallel": 2}
STAGES, SEQUENCE = {"pipeline_model_parallel": 2}, TENSOR | {"sequence_parallel": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hybrid")
    for name in FAMILIES:
        save_hybrid(name, root / name)
        convert(root / name, root / f"{name} of Megatron")
    kinds = ("", " of Megatron")
    return {name + kind: str(root / (name + kind)) for name in FAMILIES for kind in kinds}


def _columns_on_ranks(folder: str, sizes: dict[str, Any]) -> list[list[float]]:
    """Logits of this rank; of the first of two pipeline stages, none."""
    source = open_model(folder)
    model: Any = build_model(source.architecture, torch.float32, CPU, sizes=ParallelSizes(**sizes))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    source.load_weights(model)
    if not model.pre_process:
        hidden = torch.empty(len(TOKENS), 1, model.config.hidden_size)
        torch.distributed.recv(hidden, 0)
        model.set_input_tensor(hidden)
    logits = whole_logits(model, TOKENS)
    if not model.post_process:
        torch.distributed.send(logits.contiguous(), 1)
        return []
    columns: list[list[float]] = logits.tolist()
    return columns


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"),
    [
        ("nemotron-3", TENSOR, 2),
        ("granite-moe", TENSOR, 2),
        ("nemotron-3 of Megatron", SEQUENCE, 2),
        ("granite-moe of Megatron", SEQUENCE, 2),
        ("nemotron-3", STAGES, 2),
        ("nemotron-3", EXPERTS, 2),
        ("granite-moe", EXPERTS | TENSOR, 4),
        ("qwen3-next", TENSOR, 2),
        ("qwen3.5", TENSOR, 2),
        ("qwen3-next of Megatron", SEQUENCE, 2),
        ("qwen3.5 of Megatron", TENSOR, 2),
        ("qwen3.5", STAGES, 2),
        ("qwen3-next", EXPERTS, 2),
        ("qwen3-next", EXPERTS | TENSOR, 4),
    ],
)
def test_ranks_say_what_one_says(
    name: str, sizes: dict[str, Any], ranks: int, folders: dict[str, str]
) -> None:
    whole = folders[name.removesuffix(" of Megatron")]
    expected = whole_logits(load_model(whole, torch.float32, CPU).model, TOKENS)
    found = run_ranks(ranks, _columns_on_ranks, folders[name], sizes)
    if "pipeline_model_parallel" in sizes:
        assert found.pop(0) == []
    shared = sizes.get("tensor_model_parallel", 1)
    for first in range(0, len(found), shared):
        logits = torch.cat([torch.tensor(part) for part in found[first : first + shared]], 1)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["nemotron-3", "qwen3-next"])
def test_megatron_reads_what_we_write(name: str, folders: dict[str, str]) -> None:
    folder = folders[f"{name} of Megatron"]
    expected = load_model(folder, torch.float32, CPU)
    model = build_model(expected.architecture, torch.float32, CPU)
    init_dummy_weights(model)
    state = dist_checkpointing.load(model.sharded_state_dict(prefix=""), folder)
    model.load_state_dict(state)
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    if name == "qwen3-next":
        keys = {item for item in dist_checkpointing.load_tensors_metadata(folder)}
        assert "decoder.layers.0.self_attention.in_proj.layer_norm_weight" in keys
        assert "decoder.layers.1.mlp.shared_experts.gate_weight" in keys


def described(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What a checkpoint would hold: key, whole shape, place, which replica."""
    found = []
    for value in state.values():
        parts = value.build() if hasattr(value, "build_fn") else [value]
        for part in (part for part in parts if "_extra_state" not in part.key):
            found.append((part.key, part.global_shape, part.global_offset, part.replica_id))
    return sorted(found, key=str)
