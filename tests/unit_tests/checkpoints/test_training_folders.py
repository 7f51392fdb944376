"""Folders of training runs: what is beside the weights, other formats, several ranks, and logits as
Megatron's own forward computes them."""

import json
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.models.gpt import GPTModel

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.torch_dist import TorchDistSource
from megatron_async.checkpoints.torch_dist_reader import TorchDistReader
from megatron_async.checkpoints.torch_dist_strategy import SynchronousSaveStrategy
from megatron_async.cli import main as cli
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from tests.support.ranks import run_ranks
from tests.unit_tests.checkpoints.hybrid_families import assert_same_weights
from tests.unit_tests.checkpoints.test_loading import load, part_of
from tests.unit_tests.checkpoints.training_checkpoints import (
    megatron_log_probs,
    parsed_args,
    save_run,
    trained_model,
)

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
    """Bytes of optimizer states are overwritten, and nobody notices. Other tensors are named."""
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
def test_root_and_iteration_both_open(tracked: str, run_folder: Path, capsys):
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
def test_folders_that_cannot_be_read(change: Callable[[Path], Any], message: str, run_folder: Path):
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


PROMPT = [3, 17, 42, 5, 88, 61, 9, 33, 70, 2, 54, 21, 90, 7, 12, 66, 38, 81, 29, 44]
NEW_TOKENS = 6
EXPERTS = {"num_experts": 4, "add_qkv_bias": False}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
QWEN2_MOE = EXPERTS | {
    "add_qkv_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
}

MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "llama"),
    "tied": ({"untie_embeddings_and_output_weights": False}, "llama"),
    "rope-percent": ({"rotary_percent": 0.5}, "llama"),
    "rope-scaling": ({"use_rope_scaling": True, "rotary_base": 500000}, "llama"),
    "qwen2": ({"add_qkv_bias": True}, "qwen2"),
    "bias-and-norm": ({"add_qkv_bias": True, "qk_layernorm": True}, "megatron"),
    "experts": (EXPERTS, "mixtral"),
    "some-experts": (EXPERTS | {"moe_layer_freq": [0, 1]}, "mixtral"),
    "expert-bias": (EXPERTS | BIASED, "mixtral"),
    "shared-expert": (EXPERTS | {"moe_shared_expert_intermediate_size": 40}, "megatron"),
    "qwen2-moe": (QWEN2_MOE, "megatron"),
    "qwen2-moe-mixed": (QWEN2_MOE | {"moe_layer_freq": [1, 0]}, "megatron"),
}
"""Changed arguments, and the family that the loader finds."""
METADATA: dict[str, dict[str, Any]] = {
    "by-layer": {"non_homogeneous_layers": True},
    "stacked": {"non_homogeneous_layers": False},
    "singleton": {"singleton_local_shards": True},
}
"""Metadata of `sharded_state_dict`: the ways in which Megatron-Core stores the same weights."""
STORED = ("llama", "shared-expert", "qwen2-moe-mixed")
"""Models that are stored in all these ways."""


def check_served(folder: Path, model: GPTModel) -> None:
    """Greedy tokens and the log probs of every token are those of Megatron's forward."""
    llm = LLM(str(folder), device="cpu", dtype="float32", buffer_size_gb=0.01)
    asks = SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=NEW_TOKENS,
        return_log_probs=True,
        skip_prompt_log_probs=False,
        termination_id=-1,
    )
    (request,) = llm.generate([PROMPT], asks)
    llm.close()
    assert request.prompt_log_probs is not None
    assert request.generated_log_probs is not None
    tokens = PROMPT + request.generated_tokens
    expected = megatron_log_probs(model, tokens)[:-1]
    assert tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 :].argmax(-1).tolist()
    found = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
    chosen = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, chosen, atol=3e-4, rtol=1e-4)


CASES = [(name, "by-layer") for name in MODELS]
CASES += [(name, kind) for name in STORED for kind in ("stacked", "singleton")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_served_as_megatron_computes(name: str, kind: str, tmp_path: Path) -> None:
    changes, family = MODELS[name]
    args = parsed_args(**changes)
    model = trained_model(args)
    save_run(model, tmp_path, args, METADATA[kind])
    assert open_model(tmp_path).architecture.model_type == family
    check_served(tmp_path, model)


def test_names_of_transformer_engine(tmp_path: Path) -> None:
    """In Megatron's TransformerEngine spec the norm before experts is a module of its own, which
    the local spec stores under the name of a norm in `linear_fc1`. All other keys, those of
    grouped experts too, are equal (`TEGroupedMLP.sharded_state_dict`)."""
    args = parsed_args(**QWEN2_MOE)
    model = trained_model(args)
    local, other = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    save_run(model, tmp_path, args, METADATA["by-layer"], rename=lambda k: k.replace(local, other))
    found = open_model(tmp_path)
    assert isinstance(found, TorchDistSource)
    keys = TorchDistReader(found.folder).shapes
    assert f"decoder.layers.1.{other}" in keys
    assert not any(local in key for key in keys)
    assert TorchDistReader(found.folder).has_object(
        "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1"
    )
    check_served(tmp_path, model)


WORLD = 4
SHARED_EXPERTS = {"num_experts": 4, "moe_shared_expert_intermediate_size": 40}
JOBS: dict[str, tuple[ParallelSizes, bool, dict[str, Any]]] = {
    "tp2-pp2": (ParallelSizes(2, 2), False, {}),
    "tp2-dp2-fully-parallel": (ParallelSizes(2), True, {"add_qkv_bias": True}),
    "pp2-ep2-fully-parallel": (ParallelSizes(1, 2, 2), True, SHARED_EXPERTS),
}
"""Sizes of groups, whether data-parallel ranks share the writing, and changed arguments."""


def write(folder: str, sizes: ParallelSizes, is_shared: bool, changes: dict[str, Any]) -> None:
    """Every rank writes its part of a model; weights differ from rank to rank."""
    ensure_process_groups(sizes)
    args = parsed_args(**changes)
    model = trained_model(
        args,
        tensor_model_parallel_size=sizes.tensor_model_parallel,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel,
        expert_model_parallel_size=sizes.expert_model_parallel,
        pipeline_dtype=torch.float32,
        sequence_parallel=False,
    )
    strategy: Any = SynchronousSaveStrategy()
    if is_shared:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    save_run(model, Path(folder), args, strategy=strategy)


def load_half(folder: str) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in load(folder, 2).items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        run_ranks(WORLD, write, str(folder), *JOBS[case])
        return folder

    return make


@pytest.mark.parametrize("case", JOBS)
def test_shards_of_ranks_are_one_model(case: str, written: Callable[[str], Path]) -> None:
    """The reference is Megatron's own reader: a model of one rank that has loaded the folder."""
    folder = written(case)
    assert len({path.name.split("_")[2] for path in folder.glob("*.distcp")}) > 1
    whole = trained_model(parsed_args(**JOBS[case][2]))
    wanted = {"model": whole.sharded_state_dict(metadata={"dp_cp_group": _data_parallel()})}
    state = dist_checkpointing.load(wanted, str(folder))
    whole.load_state_dict(state["model"])
    check_served(folder, whole)


def test_two_ranks_read_what_four_wrote(written: Callable[[str], Path]) -> None:
    folder = str(written("tp2-pp2"))
    whole = load(folder, 1)
    halves = run_ranks(2, load_half, folder)
    for rank, half in enumerate(halves):
        assert half.keys() == whole.keys()
        for name, values in half.items():
            assert torch.equal(torch.tensor(values), part_of(name, whole[name], rank)), name


def _data_parallel() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
