"""A rank reads its part of every weight, from every kind of source."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model, init_dummy_weights
from megatron_async.models.parallel_state import ParallelSizes
from tests.support.ranks import run_ranks
from tests.unit_tests.checkpoints.test_gguf import write_gguf

CPU = torch.device("cpu")
RANKS = 2
LLAMA = ModelArchitecture("llama", 2, 64, 4, 2, 16, 96, 131, tie_word_embeddings=True)
"""A vocabulary that does not divide, and MLP columns that halve a quantised block."""
QWEN = ModelArchitecture("qwen2", 2, 64, 4, 2, 16, 96, 131, add_qkv_bias=True)
FORMATS = ("gguf", "huggingface", "torch_dist", "dummy")


def write_huggingface(architecture: ModelArchitecture, folder: Path) -> Path:
    model = build_model(architecture, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    save_huggingface(model, architecture, None, folder)
    return folder


def load(name: str, ranks: int) -> dict[str, Tensor]:
    source = open_model(name)
    model = build_model(source.architecture, torch.float32, CPU, sizes=ParallelSizes(ranks))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    source.load_weights(model)
    return {name: parameter.data for name, parameter in model.named_parameters()}


def load_shards(names: list[str]) -> list[dict[str, list[float]]]:
    return [{key: tensor.tolist() for key, tensor in load(name, RANKS).items()} for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sharded")
    qwen = write_huggingface(QWEN, folder / "qwen")
    convert(qwen, folder / "torch_dist")
    llama = write_huggingface(LLAMA, folder / "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    quantised = write_gguf(folder / "m.gguf", llama, "llama", LLAMA, quantisation=kind)
    paths = (quantised, qwen, folder / "torch_dist", "dummy:tiny")
    return {name: str(path) for name, path in zip(FORMATS, paths, strict=True)}


@pytest.fixture(scope="module")
def shards(models: dict[str, str]) -> list[list[dict[str, list[float]]]]:
    found: list[list[dict[str, list[float]]]] = run_ranks(
        RANKS, load_shards, [models[name] for name in FORMATS]
    )
    return found


def part_of(name: str, whole: Tensor, rank: int) -> Tensor:
    """What Megatron's layers expect a rank to hold."""
    if "linear_qkv" in name:
        return whole.chunk(RANKS)[rank]
    if "linear_fc1" in name:
        return torch.cat([half.chunk(RANKS)[rank] for half in whole.chunk(2)])
    if "linear_proj" in name or "linear_fc2" in name:
        return whole.chunk(RANKS, dim=1)[rank]
    if "word_embeddings" in name or "output_layer" in name:
        padding = -len(whole) % RANKS
        padded = torch.cat([whole, whole.new_zeros(padding, whole.size(1))])
        return padded.chunk(RANKS)[rank]
    return whole


@pytest.mark.parametrize("kind", FORMATS)
def test_every_rank_reads_its_part(
    kind: str, models: dict[str, str], shards: list[list[dict[str, list[float]]]]
) -> None:
    whole = load(models[kind], 1)
    for rank in range(RANKS):
        found = shards[rank][FORMATS.index(kind)]
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(torch.tensor(found[name]), part_of(name, tensor, rank)), name


def test_only_a_rank_s_share_is_taken_from_the_file(models: dict[str, str]) -> None:
    source = open_model(models["huggingface"])
    held = list(weights(source.architecture, Shard(1, RANKS)))
    sizes = {w.name: sum(p.numel() for p in w.places(torch.empty(w.shape)).values()) for w in held}
    for weight in held:
        read = sum(
            source.read_tensor(part, weight.held(part), CPU).numel()  # type: ignore[attr-defined]
            for part in weight.parts
        )
        assert read == sizes[weight.name]
    split = [weight for weight in held if weight.partition_dim is not None]
    assert all(2 * sizes[w.name] <= whole_size(w.whole_shape) for w in split)


def whole_size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def test_ranks_beyond_the_vocabulary_hold_only_padding() -> None:
    shard = Shard(3, 4)
    assert shard.range_of(5) == range(5, 5)
    assert [len(Shard(rank, 4).range_of(5)) for rank in range(4)] == [2, 2, 1, 0]


def test_the_dummy_model_of_one_rank_is_that_of_every_test(models: dict[str, str]) -> None:
    model = build_model(DUMMY_SHAPES["tiny"], torch.float32, CPU)
    init_dummy_weights(model)
    for name, tensor in load(models["dummy"], 1).items():
        assert torch.equal(tensor, model.get_parameter(name)), name
