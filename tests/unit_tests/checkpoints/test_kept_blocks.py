"""Models whose weights stay the blocks of a GGUF file: the same numbers as dequantised, mixed
files, what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.checkpoints.kept_blocks import keep_blocks
from megatron_async.checkpoints.quantised_model import chosen_quantization
from megatron_async.errors import ConfigurationError, UpdateError
from megatron_async.models import compiled_layers
from megatron_async.models.compiled_layers import CompiledLayers
from megatron_async.models.hybrid import build_model
from megatron_async.models.linear import bits_of_weights
from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight
from megatron_async.updates.checksum import weights_checksum
from tests.support.gguf_files import write_gguf
from tests.unit_tests.checkpoints.hybrid_families import FAMILIES

pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")
Q = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
WIDE = "llama-wide"


def mixed(name: str) -> gguf.GGMLQuantizationType:
    """Types as in files named Q4_K_M: some values and some MLPs have more bits; and the head."""
    if name == "output.weight":
        return Q.Q6_K
    if "attn_v" in name or "ffn_down" in name:
        return Q.Q4_K if ".1." in name else Q.Q6_K
    return Q.Q5_K if "attn_output" in name else Q.Q4_K


def plain_and_mixed(name: str) -> gguf.GGMLQuantizationType:
    """One layer has a tensor that is not quantised, and the embedding neither."""
    if name in ("blk.0.attn_k.weight", "token_embd.weight"):
        return Q.F16
    return Q.Q8_0 if "ffn" in name else Q.Q4_1


@pytest.fixture
def make_gguf(
    family_folder: Callable[[str], Path], hybrid_folder: Callable[[str], Path], tmp_path: Path
) -> Callable[..., Path]:
    def make(family: str, kind: str, quantisation: Any, **changes: Any) -> Path:
        folder = family_folder(family) if family in FAMILIES else hybrid_folder(family)
        architecture = open_model(folder).architecture
        return write_gguf(
            tmp_path / "m.gguf", folder, kind, architecture, quantisation=quantisation, **changes
        )

    return make


def kept_model(path: Path) -> Any:
    source = open_model(path)
    model = build_model(source.architecture, torch.float32, CPU)
    keep_blocks(source, model, is_fine=True)
    source.load_weights(model)
    return model, source


def kept_by_name(model: nn.Module) -> dict[str, GroupedWeight]:
    """By the name of the parameter that they stand for."""
    found = {}
    for name, module in model.named_modules():
        kept = getattr(module, "packed_weight", None)
        if kept is not None:
            name = name.replace("embedding", "embedding.word_embeddings")
            found[f"{name}.weight"] = kept
    return found


@pytest.mark.parametrize(
    ("family", "kind", "quantisation", "missing"),
    [
        ("llama-tied", "llama", Q.Q4_0, 0),
        ("qwen2", "qwen2", Q.Q8_0, 0),
        ("qwen3-tied", "qwen3", Q.Q5_1, 0),
        (WIDE, "llama", mixed, 0),
        ("qwen2", "qwen2", plain_and_mixed, 2),
    ],
)
def test_numbers_are_those_of_the_file(
    family: str, kind: str, quantisation: Any, missing: int, make_gguf: Callable[..., Path]
) -> None:
    """Query, key and value of a group side by side, rows as llama.cpp reorders them, [gate; up],
    and a head that is the embedding."""
    path = make_gguf(family, kind, quantisation)
    model, source = kept_model(path)
    expected = dict(load_model(path, torch.float32, CPU).model.named_parameters())
    kept = kept_by_name(model)
    a = source.architecture
    head = model.output_layer.packed_weight
    assert (head is model.embedding.packed_weight) == a.tie_word_embeddings
    if a.tie_word_embeddings:
        assert kept.pop("output_layer.weight") is kept["embedding.word_embeddings.weight"]
    assert len(kept) == 4 * a.num_layers + 2 - a.tie_word_embeddings - missing
    for name, parameter in model.named_parameters():
        if name not in kept:
            assert torch.equal(parameter, expected[name]), name
            continue
        assert parameter.is_meta
        rows = torch.arange(len(expected[name]))
        assert torch.equal(kept[name].rows(rows), expected[name]), name
    floats = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    # The rows of every weight fill its blocks here.
    assert source.kept_bytes == floats + sum(weight.nbytes for weight in kept.values())


@pytest.mark.parametrize(
    ("family", "kind", "quantisation", "kept_layers"),
    [
        ("qwen3-experts", "qwen3moe", Q.Q5_1, 3 * 4),
        ("granite-moe", "granitehybrid", Q.Q8_0, 3 * 2 + 3),
        ("nemotron of experts", "nemotron_h_moe", Q.Q4_1, 2 * 2 + 2 + 2 * 3),
    ],
)
def test_experts_and_hybrids(
    family: str, kind: str, quantisation: Any, kept_layers: int, make_gguf: Callable[..., Path]
) -> None:
    """Stacked experts, Mamba-2's strips, and a residual multiplier, which scales take in. Experts
    of which one matrix has rows that no block divides are float32 (Granite's here)."""
    path = make_gguf(family, kind, quantisation)
    model, source = kept_model(path)
    expected = dict(load_model(path, torch.float32, CPU).model.named_parameters())
    kept = kept_by_name(model)
    kept.pop("output_layer.weight" if source.architecture.tie_word_embeddings else "", None)
    assert len(kept) == kept_layers + 2 - source.architecture.tie_word_embeddings
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (name in kept)
        if name in kept:
            whole = expected[name].flatten(0, -2)
            found = kept[name].rows(torch.arange(len(whole)))
            torch.testing.assert_close(found, whole, rtol=2e-7, atol=1e-8, msg=name)
    floats = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    assert abs(source.kept_bytes - floats - sum(w.nbytes for w in kept.values())) < 4096
    found, expected = (log_probs(path, kept)[:GIVEN] for kept in ("file", "none"))
    assert 0 < (found / expected - 1).abs().max() < 1e-3


PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7, 8], [11, 3, 5])
GIVEN = sum(len(prompt) - 1 for prompt in PROMPTS)


def log_probs(path: Path, quantization: str | None) -> torch.Tensor:
    """Log probs of prompts' tokens, `GIVEN` in all, then of those behind each."""
    settings = {"device": "cpu", "check_integrity": True, "quantization": quantization}
    with LLM(str(path), **settings) as llm:
        params = SamplingParams(
            num_tokens_to_generate=5, temperature=0.0, termination_id=-1, return_log_probs=True,
            skip_prompt_log_probs=False,
        )  # fmt: skip
        found = llm.generate(list(PROMPTS), params)
        model: Any = llm.engine.controller.inference_wrapped_model.model
        assert bool(bits_of_weights(model)) == (quantization != "none")
        given = [number for each in found for number in each.prompt_log_probs]
        return torch.tensor(given + [n for each in found for n in each.generated_log_probs])


def test_default_and_settings(make_gguf: Callable[..., Path]) -> None:
    """Rows of 16 bits are near float32 by default; rows of 8 bits are asked for."""
    path = make_gguf(WIDE, "llama", mixed)
    expected = log_probs(path, "none")[:GIVEN]
    for quantization, least, most in (
        (None, 0, 2e-4), ("file", 0, 2e-4), ("int8", 1e-3, 0.05), ("auto", 1e-3, 0.05),
    ):  # fmt: skip
        found = log_probs(path, quantization)[:GIVEN]
        assert least < (found / expected - 1).abs().mean() < most


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ((WIDE, "llama", mixed), "file"),
        ((WIDE, "llama", mixed), "int8"),
        (("granite of whole blocks", "granitehybrid", Q.Q8_0), "file"),
    ],
)
def test_compiled_layers_have_the_bits_of_the_modules(
    model: Any, quantization: str, make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 16 and of 8 bits, by weights of three forms, and Mamba-2 layers, in one compiled call
    or module by module."""
    path, passes, run = make_gguf(*model), 0, CompiledLayers.run

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return run(*arguments)

    monkeypatch.setattr(CompiledLayers, "run", counted)
    found = log_probs(path, quantization)
    assert passes > 3
    monkeypatch.setattr(compiled_layers, "can_compile", lambda stack: False)
    passes = 0
    assert torch.equal(log_probs(path, quantization), found)
    assert passes == 0


def test_info_tells_the_bits(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(WIDE, "llama", mixed)
    info = model_info(path)
    assert info.weight_bytes == open_model(path).kept_bytes
    text = format_info(info)
    assert re.search(
        r"gguf: Q4_K: \d+ weights, Q5_K: 2 weights, Q6_K: 3 weights, 4\.\d+ bits", text
    )
    assert "weights, kept as blocks" in text
    floats = model_info(path, dtype="bfloat16")
    assert floats.weight_bytes == 2 * floats.parameters
    assert "weights, bfloat16" in format_info(floats)


def test_other_models_are_as_before(make_gguf, family_folder) -> None:
    """A 16-bit folder, a file of floats, another dtype."""
    _check_as_before(family_folder("qwen3-bf16"))
    _check_as_before(make_gguf("llama-tied", "llama", Q.F16))
    _check_as_before(make_gguf("llama-tied", "llama", Q.Q8_0), dtype="bfloat16")


def _check_as_before(model: Path, **settings: Any) -> None:
    with LLM(str(model), device="cpu", **settings) as llm:
        assert llm.engine.context.config.quantization is None
    with pytest.raises(ConfigurationError, match="the blocks of a quantised GGUF file"):
        LLM(str(model), device="cpu", quantization="file", **settings)


def test_a_gpu_keeps_no_blocks(make_gguf: Callable[..., Path]) -> None:
    source = open_model(make_gguf("llama-tied", "llama", Q.Q8_0))
    assert chosen_quantization(None, source, "cuda:0") is None
    assert chosen_quantization("fp8", source, "cuda:0") == "fp8"
    with pytest.raises(ConfigurationError, match="that a Hugging Face folder holds quantised"):
        chosen_quantization("file", source, "cuda:0")


def test_new_weights_are_refused(make_gguf: Callable[..., Path]) -> None:
    """Also numbers that are written in place, where a parameter has none."""
    told = "start the engine with quantization='none'"
    with LLM(str(make_gguf("llama-tied", "llama", Q.Q8_0)), device="cpu") as llm:
        with pytest.raises(UpdateError, match=told):
            llm.update_weights([], version=1)
        with pytest.raises(UpdateError, match=told), llm.weights_open(version=1):
            pytest.fail("parameters without numbers are open")
        with pytest.raises(UpdateError, match=told):
            weights_checksum(llm.engine.controller.inference_wrapped_model.model)


def test_scales_that_cannot_be_kept(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf("llama-tied", "llama", Q.Q4_1)
    source: Any = open_model(path)
    tensor = source._tensors["blk.1.ffn_up.weight"]
    place, data = tensor.data_offset, bytearray(path.read_bytes())
    data[place : place + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"ffn_gate.*ffn_up.* has scales that are not finite"):
        LLM(str(path), device="cpu")


def test_tensors_of_other_shapes_are_named(make_gguf: Callable[..., Path]) -> None:
    """Before they are put side by side. Break it: ask for the file's blocks without its shapes."""
    other = {"blk.0.attn_q.weight": np.ones((64, 32), np.float32)}
    path = make_gguf("llama-tied", "llama", Q.Q8_0, tensors=other)
    with pytest.raises(CheckpointError, match=r"attn_q.weight' has the wrong shape: .*\[64, 32\]"):
        LLM(str(path), device="cpu")
    with pytest.raises(CheckpointError, match="wrong shape"):
        LLM(str(make_gguf("llama-tied", "llama", Q.Q8_0, fields={"llama.embedding_length": 96})))
