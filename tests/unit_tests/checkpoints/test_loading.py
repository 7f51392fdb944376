"""Weights go to the device part by part, as they are stored; the host holds no copy of a model."""

from __future__ import annotations

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
from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.models.hybrid import build_model
from tests.unit_tests.checkpoints.test_gguf import write_gguf

CPU, META = torch.device("cpu"), torch.device("meta")


class HostCopies(TorchDispatchMode):
    """Bytes of every tensor that an operator makes in the host's memory (views are none)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
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


def test_the_bar_counts_bytes_a_second(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    load_model(model_path, torch.float32, CPU, progress=True)
    assert not capsys.readouterr().err, "it is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_model(model_path, torch.float32, CPU, progress=True)
    assert "B/s]" in capsys.readouterr().err


def test_a_large_gguf_tensor_never_exists_in_float32(monkeypatch: pytest.MonkeyPatch):
    source = open_model("smollm2")
    model = build_model(source.architecture, torch.bfloat16, CPU)
    assert source.tensor_shapes["model.embed_tokens.weight"] == (49152, 576)
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
