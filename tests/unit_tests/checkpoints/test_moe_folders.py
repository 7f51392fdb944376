"""Models with experts: both spellings of weights, tokens as transformers', parts for ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import HuggingFaceSource
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from tests.support.ranks import run_ranks
from tests.unit_tests.checkpoints.hybrid_families import assert_same_weights, edited

CPU = torch.device("cpu")
MOE_FAMILIES = ("mixtral", "qwen3-moe")


def stacked_folder(folder: Path, target: Path) -> Path:
    """A copy of the model with the tensors that transformers' modules hold: one for all experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    shutil.copytree(folder, target)
    (target / "model.safetensors").unlink()
    save_file(dict(model.state_dict()), target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_in_one_tensor(family: str, family_folder: Callable[[str], Path], tmp_path):
    folder = stacked_folder(family_folder(family), tmp_path / "stacked")
    names = set(open_model(folder).tensor_shapes)
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    expected = load_model(family_folder(family), torch.float32, CPU).model
    found = load_model(folder, torch.float32, CPU).model
    assert_same_weights(dict(found.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_engine_says_what_transformers_says(family: str, family_folder: Callable[[str], Path]):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(family_folder(family))
    prompts = [[5, 9, 17], list(range(30, 70)), [101]]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    params = SamplingParams(num_tokens_to_generate=12, temperature=0.0, termination_id=-1)
    with LLM(str(family_folder(family)), device="cpu", max_tokens=16, max_requests=4) as llm:
        found = [request.generated_tokens for request in llm.generate(prompts, params)]
    assert found == expected


def _experts_here(folders: list[str]) -> list[dict[str, np.ndarray]]:
    """The experts' weights that this rank of TP 2 x EP 2 loads from each folder."""
    sizes = ParallelSizes(tensor_model_parallel=2, expert_model_parallel=2)
    found = []
    for folder in folders:
        source = open_model(folder)
        model = build_model(source.architecture, torch.float32, CPU, sizes=sizes)
        source.load_weights(model)
        found.append({n: p.numpy() for n, p in model.named_parameters() if ".experts." in n})
    return found


def part_of(name: str, weight: Tensor, tensor_rank: int, expert_rank: int, tensor_size: int = 2):
    weight = weight.chunk(2)[expert_rank]
    if name.endswith("fc2.weight"):
        return weight.chunk(tensor_size, 2)[tensor_rank]
    halves = [half.chunk(tensor_size, 1)[tensor_rank] for half in weight.chunk(2, 1)]
    return torch.cat(halves, 1)


@pytest.fixture
def whole(family_folder: Callable[[str], Path]) -> dict[str, Tensor]:
    """All experts' weights of a model."""
    model = load_model(family_folder("qwen3-moe"), torch.float32, CPU).model
    found = {n: p.detach() for n, p in model.named_parameters() if ".experts." in n}
    assert len(found) == 4
    return found


def test_each_rank_loads_its_part_of_its_experts(whole, family_folder, tmp_path):
    folder = family_folder("qwen3-moe")
    convert(folder, tmp_path / "megatron")
    ranks = run_ranks(4, _experts_here, [str(folder), str(tmp_path / "megatron")])
    for rank, loaded in enumerate(ranks):
        expected = {n: part_of(n, weight, rank % 2, rank // 2) for n, weight in whole.items()}
        for found in loaded:
            assert_same_weights({n: torch.from_numpy(w) for n, w in found.items()}, expected)


def test_experts_in_one_tensor_are_spread_over_ranks(whole, family_folder, tmp_path):
    source = open_model(stacked_folder(family_folder("qwen3-moe"), tmp_path / "stacked"))
    assert isinstance(source, HuggingFaceSource)
    shard = Shard(expert_rank=1, expert_size=2)
    found = {}
    for weight in weights(source.architecture, shard, stacked_experts=True):
        if weight.experts:
            found[weight.name] = torch.empty(weight.shape)
            for name, place in weight.places(found[weight.name]).items():
                source.fill(place, name, weight.held(name))
    assert_same_weights(found, {n: part_of(n, w, 0, 1, tensor_size=1) for n, w in whole.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_.*experts = 4"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers = 'all' must be a list"),
        ({"decoder_sparse_step": 2}, r"layers.0.mlp.gate_proj.weight. .* is missing"),
    ],
)
def test_folders_that_cannot_be_served(changes: dict, message: str, family_folder, tmp_path):
    folder = edited(family_folder("qwen3-moe"), tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32, CPU)


def test_well_known_shapes_have_the_parameters_of_their_names() -> None:
    mixtral, qwen = DUMMY_SHAPES["mixtral-8x7b"], DUMMY_SHAPES["qwen3-30b-a3b"]
    assert [round(a.num_parameters / 1e9, 1) for a in (mixtral, qwen)] == [46.7, 30.5]
    assert [round(a.num_active_parameters / 1e9, 1) for a in (mixtral, qwen)] == [12.9, 3.4]
    text = format_info(model_info("dummy:qwen3-30b-a3b"))
    assert "128, 8 a token, ffn 768" in text
    assert "a token meets 3,3" in text
