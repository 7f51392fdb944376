"""Weights go to the device part by part, as they are stored, each rank's and stage's own, and what
does not fit is told before; the host holds no copy of a model."""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_async.checkpoints.gguf as gguf_source
from megatron_async import LLM
from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.info import GIB, check_weights_fit
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.devices import CpuDevice
from megatron_async.errors import OutOfMemoryError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model, init_dummy_weights
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.pipeline import EMBEDDING, OUTPUT, stage_of
from tests.support.gguf_files import write_gguf
from tests.support.ranks import run_ranks

CPU, META = torch.device("cpu"), torch.device("meta")


class HostCopies(TorchDispatchMode):
    """Bytes of every tensor that an operator makes in the host's memory. Views are none, nor is
    memory that a file is read into."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            return output
        inputs = {t.untyped_storage().data_ptr() for t in host_tensors((args, kwargs))}
        self.bytes += [
            t.nbytes for t in host_tensors(output) if t.untyped_storage().data_ptr() not in inputs
        ]
        return output


def host_tensors(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [t for t in leaves if isinstance(t, Tensor) and t.device.type == "cpu"]


@pytest.fixture(params=["huggingface", "torch_dist", "gguf"])
def model_path(
    request: pytest.FixtureRequest, family_folder: Callable[[str], Path], tmp_path: Path
) -> Path:
    """A model with separate q, k, v and gate, up, in each format."""
    folder = family_folder("llama-tied")
    if request.param == "gguf":
        kind = gguf.GGMLQuantizationType.Q8_0
        return write_gguf(
            tmp_path / "m.gguf", folder, "llama", open_model(folder).architecture, quantisation=kind
        )
    if request.param == "torch_dist":
        convert(folder, tmp_path / "m")
        return tmp_path / "m"
    return folder


def test_nothing_is_copied_or_converted_on_the_host(model_path: Path):
    source = open_model(model_path)
    # The meta device stands for a GPU: what is not done there is done on the host.
    model = build_model(source.architecture, torch.float16, META)
    with HostCopies() as copies:
        source.load_weights(model)
    assert sum(copies.bytes) == 0


def test_the_bar_counts_bytes_a_second(model_path: Path, capsys, monkeypatch):
    load_model(model_path, torch.float32, CPU, progress=True)
    assert not capsys.readouterr().err, "it is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_model(model_path, torch.float32, CPU, progress=True)
    assert "B/s]" in capsys.readouterr().err


def test_a_large_gguf_tensor_never_exists_in_float32(monkeypatch: pytest.MonkeyPatch):
    source = open_model("smollm2")
    model = build_model(source.architecture, torch.bfloat16, CPU)
    assert source.tensor_shapes["token_embd.weight"] == (49152, 576)
    made: list[int] = []
    original = gguf_source.dequantise

    def recording(*arguments: Any) -> Tensor:
        made.append(original(*arguments).nbytes)
        return original(*arguments)

    monkeypatch.setattr(gguf_source, "dequantise", recording)
    tracemalloc.start()
    try:
        source.load_weights(model)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(made) <= 4 * gguf_source.PIECE_VALUES
    assert sum(made) == 4 * source.architecture.num_parameters
    assert peak < 10e6  # numpy's: the file is mapped, not read


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_a_gpu_are_those_on_the_cpu(model_path: Path, dtype: torch.dtype):
    expected = dict(load_model(model_path, dtype, CPU).model.named_parameters())
    loaded = load_model(model_path, dtype, torch.device("cuda")).model
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.device.type == "cuda"
        assert torch.equal(parameter.cpu(), expected[name]), name


@pytest.mark.gpu
def test_dummy_weights_are_made_on_the_gpu():
    device = torch.device("cuda")
    source = open_model("dummy:smollm2-135m")
    model = build_model(source.architecture, torch.bfloat16, device)
    with HostCopies() as copies:
        source.load_weights(model)
    assert sum(copies.bytes) == 0
    again = load_model("dummy:smollm2-135m", torch.bfloat16, device).model
    for (name, first), second in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(first, second), name
        if first.dim() == 2:
            assert 0.015 < float(first.float().std()) < 0.025, name


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
def test_every_rank_reads_its_part(kind: str, models, shards):
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


Weights = dict[str, torch.Tensor]


def load_stages(folders: list[str], stages: int) -> list[Weights]:
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
    """State of one of two stages, as bytes: tensors are shared memory of a process that ends."""
    return [{n: p.numpy().tobytes() for n, p in held.items()} for held in load_stages(folders, 2)]


def test_stages_load_their_layers_alone(tmp_path: Path) -> None:
    folders = [str(tmp_path / to) for to in ("huggingface", "torch_dist")]
    for folder in folders:
        convert("dummy:tiny", Path(folder), to=Path(folder).name)
    first, last = run_ranks(2, load_bytes, folders)
    for whole, *stages in zip(load_stages(folders, 1), first, last, strict=True):
        wanted = {name: p.numpy().tobytes() for name, p in whole.items()}
        assert stages[1].pop(OUTPUT) == wanted[EMBEDDING], "tied: the last stage has a copy"
        assert not stages[0].keys() & stages[1].keys()
        assert stages[0] | stages[1] == wanted


LLAMA_8B = DUMMY_SHAPES["llama-3.1-8b"]  # 8.03 thousand million weights
ALONE = ParallelSizes()


def test_figures_and_remedy() -> None:
    with pytest.raises(OutOfMemoryError) as error:
        check_weights_fit(LLAMA_8B, torch.float32, ALONE, 20 * GIB)
    assert "the weights take 29.9 GiB in float32, and 20 GiB of memory are free" in str(error.value)
    assert "In bfloat16 (dtype='bfloat16') they take 15 GiB." in str(error.value)
    with pytest.raises(OutOfMemoryError) as error:
        check_weights_fit(LLAMA_8B, torch.bfloat16, ALONE, 10 * GIB)
    assert "bfloat16 (dtype" not in str(error.value)


def test_what_fits_passes() -> None:
    with pytest.raises(OutOfMemoryError, match="quantization='file' keeps them on a GPU"):
        check_weights_fit(LLAMA_8B, torch.bfloat16, ALONE, 10 * GIB, is_quantised=True)
    check_weights_fit(LLAMA_8B, torch.bfloat16, ALONE, 15 * GIB)
    check_weights_fit(LLAMA_8B, torch.float32, ParallelSizes(2), 15 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"a rank's share of the weights \(1 of 2\)"):
        check_weights_fit(LLAMA_8B, torch.float32, ParallelSizes(2), 14 * GIB)


def test_nothing_is_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_memory", lambda _: 100_000)
    monkeypatch.setattr("megatron_async.llm.build_model", None)
    with pytest.raises(OutOfMemoryError, match="GiB of memory are free"):
        LLM("dummy:tiny", device="cpu")
