"""GGUF files, and dequantisation against the gguf package, bit for bit."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.gguf import GGUFSource
from megatron_async.checkpoints.mapping import Shard
from megatron_async.models.architecture import RopeScaling
from megatron_async.models.rotary import inverse_frequencies
from megatron_async.ops.linear.gguf_blocks import BLOCKS, PLAIN, dequantise
from tests.support.gguf_files import write_gguf
from tests.unit_tests.checkpoints.hybrid_families import (
    FAMILIES,
    assert_same_weights,
    huggingface_state,
)

CPU = torch.device("cpu")
Q = gguf.GGMLQuantizationType


@pytest.fixture
def llama_gguf(family_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    folder = family_folder("llama-tied")
    architecture = open_model(folder).architecture

    def make(**changes: Any) -> Path:
        return write_gguf(tmp_path / "m.gguf", folder, "llama", architecture, **changes)

    return make


def test_demo_weights_are_those_of_transformers_bit_for_bit(smollm2, transformers_smollm2):
    expected = dict(transformers_smollm2.named_parameters())
    config = transformers_smollm2.config
    found = huggingface_state(smollm2.model, smollm2.architecture)
    assert_same_weights(found, {name: p.detach() for name, p in expected.items()})
    a = smollm2.architecture
    assert a.tie_word_embeddings
    assert (a.rotary_base, a.max_position_embeddings) == (
        config.rope_parameters["rope_theta"],
        config.max_position_embeddings,
    )
    assert a.layernorm_epsilon == pytest.approx(config.rms_norm_eps, rel=1e-6)
    assert a.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama-tied", "llama"),
        ("mixtral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3-tied", "qwen3"),
        ("qwen3-experts", "qwen3moe"),
        ("granite", "granitehybrid"),
        ("granite-moe", "granitehybrid"),
        ("granite of attention", "granitemoe"),
        ("granite of attention, dense", "granite"),
        ("nemotron-h", "nemotron_h"),
        ("nemotron of experts", "nemotron_h_moe"),
    ],
)
def test_every_architecture_reads_back(
    family: str, kind: str, family_folder, hybrid_folder, tmp_path
) -> None:
    """Also parts for ranks, of the file's tensors of all experts."""
    folder = family_folder(family) if family in FAMILIES else hybrid_folder(family)
    a = open_model(folder).architecture
    path = write_gguf(tmp_path / "m.gguf", folder, kind, a)
    loaded = load_model(path, torch.float32, CPU)
    # A file does not say what no layer has.
    unsaid = [name for name in vars(a) if "mamba_" in name] * ("M" not in a.pattern)
    unsaid += ["ffn_hidden_size"] * ("-" not in a.pattern)
    assert loaded.architecture == replace(a, **{n: getattr(loaded.architecture, n) for n in unsaid})
    found, expected = (
        huggingface_state(load_model(each, torch.float32, CPU).model, a) for each in (path, folder)
    )
    for name, tensor in expected.items():
        # The converter stores -exp(A_log).
        near = {"rtol": 3e-7, "atol": 3e-7} if name.endswith("A_log") else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[name], tensor, **near, msg=name)
    source, reference = open_model(path), open_model(folder)
    if not a.num_moe_experts:
        return
    shard = Shard(tensor_rank=1, tensor_size=2, expert_rank=1, expert_size=2)
    parts = [
        {w.name: torch.empty(w.shape) for w in each.held_weights(shard)}  # type: ignore[attr-defined]
        for each in (source, reference)
    ]
    for each, into in zip((source, reference), parts, strict=True):
        each.load_into(into, shard)
    for name, tensor in parts[0].items():
        torch.testing.assert_close(tensor, parts[1][name], rtol=3e-7, atol=3e-7, msg=name)


@pytest.mark.parametrize("quantisation", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0], ids=lambda q: q.name)
def test_quantised_weights_are_dequantised(
    quantisation: gguf.GGMLQuantizationType,
    llama_gguf: Callable[..., Path],
    family_folder: Callable[[str], Path],
) -> None:
    loaded = load_model(llama_gguf(quantisation=quantisation), torch.float32, CPU)
    found = huggingface_state(loaded.model, loaded.architecture)
    for name, expected in load_file(family_folder("llama-tied") / "model.safetensors").items():
        error = (found[name] - expected).abs().max() / expected.abs().max()
        assert error < (0.15 if quantisation == Q.Q4_0 else 0.01), name


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered(factor: float, llama_gguf: Callable[..., Path]) -> None:
    scaling = RopeScaling(factor, 1.0, 4.0, 8192)
    factors = inverse_frequencies(16, 500000.0) / inverse_frequencies(16, 500000.0, scaling)
    path = llama_gguf(
        fields={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": factors.numpy()}
    )
    assert open_model(path).architecture.rope_scaling == scaling
    load_model(path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {"general.architecture": "gemma3"}}, "'gemma3' is not supported; supported: "),
        ({"fields": {"llama.expert_count": 8}}, "'llama.expert_used_count' is missing"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type = 'yarn'"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "rope.dimension_count = 8"),
        ({"fields": {"llama.block_count": None}}, "'llama.block_count' is missing"),
        ({"fields": {"llama.block_count": 4}}, "'blk.3.attn_norm.weight' .* is missing"),
        ({"fields": {"llama.block_count": "three"}}, "block_count = 'three' must be a positive"),
        ({"fields": {"llama.block_count": 2}}, r"'blk\.2\..* is not part of a 2-layer"),
        ({"tensors": {"blk.1.attn_v.weight": None}}, "blk.1.attn_v.weight' .* is missing"),
        (
            {"tensors": {"blk.1.attn_v.weight": np.zeros((64, 32), np.float32)}},
            r"blk.1.attn_v.* has the wrong shape: expected \[32, 64\], found \[64, 32\]",
        ),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight' is missing"),
        ({"tensors": {"odd": np.zeros(3, np.float32)}}, "tensor 'odd' .* is not part of"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32) * 3}}, "not a Llama-3 scaling"),
    ],
)
def test_unsupported_or_incomplete_files(changes: dict[str, Any], message: str, llama_gguf):
    fields = changes.get("fields") or {}
    if "general.architecture" in fields:
        path = llama_gguf()
        path.write_bytes(
            path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x06\0\0\0\0\0\0\0gemma3", 1)
        )
    else:
        path = llama_gguf(**changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(path, torch.float32, CPU)


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        _ = open_model(path).architecture


def test_any_truncation_is_reported(llama_gguf: Callable[..., Path]) -> None:
    path = llama_gguf()
    data = path.read_bytes()
    for length in (5, 20, 100, 500, 2000, len(data) // 2, len(data) - 64):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=f"truncated or corrupt .*{length} bytes"):
            load_model(path, torch.float32, CPU)


def test_any_corruption_is_a_clear_error_or_harmless(llama_gguf: Callable[..., Path]) -> None:
    path = llama_gguf()
    data = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[rng.randrange(4, 3000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            source = GGUFSource(path)
            _ = source.architecture, source.tokenizer, source.checked_weights
        except CheckpointError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("endianess", list(gguf.GGUFEndian))
def test_lists_are_read_as_the_library_reads_them(endianess: gguf.GGUFEndian, tmp_path):
    """Break it: a string's end, the first number of a list, or a file of the other byte order."""
    path = tmp_path / "lists.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    writer.add_array("words", ["", "gemäß", "a" * 300, "\n"])
    writer.add_array("one word", ["x"])
    writer.add_array("numbers", [3, 1, 2])
    writer.add_array("factors", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    writer.add_key_value("signs", [-3, 7], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT8)
    writer.add_string("behind", "them")
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected, found = gguf.GGUFReader(path), GGUFSource(path)._reader
    assert list(found.fields) == list(expected.fields)
    for name, field in expected.fields.items():
        assert found.fields[name].types == field.types, name
        assert found.fields[name].contents() == field.contents(), name
    assert np.array_equal(found.tensors[0].data, expected.tensors[0].data)


@pytest.mark.parametrize("values", [["a", "b"], [1, 2]])
def test_a_list_that_is_longer_than_the_file(values: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("values", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = path.read_bytes()
    count = data.index(b"values") + len("values") + 8
    path.write_bytes(data[:count] + (1 << 40).to_bytes(8, "little") + data[count + 8 :])
    with pytest.raises(CheckpointError, match=r"truncated or corrupt .* behind the end"):
        _ = GGUFSource(path).architecture


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_rows(kind: gguf.GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """Rows of random bytes in the dtype of gguf's reader: every value, scale and bit occurs."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(kind).integers(0, 256, (rows, blocks * size), np.uint8)
    return data.view({Q.F32: np.float32, Q.F16: np.float16}.get(kind, np.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*PLAIN, *BLOCKS, Q.Q2_K, Q.Q3_K], ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_package(kind: gguf.GGMLQuantizationType, device: str):
    rows = random_rows(kind, rows=7, blocks=64)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
    found = dequantise(rows, kind, torch.device(device))
    assert found.dtype == torch.float32
    assert found.device.type == device
    torch.testing.assert_close(
        found.cpu(), torch.from_numpy(np.array(expected)), rtol=0, atol=0, equal_nan=True
    )


def test_a_format_that_nobody_reads():
    with pytest.raises(NotImplementedError):
        dequantise(random_rows(Q.Q8_1, 1, 1), Q.Q8_1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "kind", "changes", "message"),
    [
        ("qwen3-experts", "qwen3moe", {"expert_count": 2**31}, "expert_count = .* any model has"),
        (
            "qwen3-experts",
            "qwen3moe",
            {"expert_count": 5},
            r"'blk.0.ffn_gate_inp.weight' .*\[5, 64",
        ),
        (
            "qwen3-experts",
            "qwen3moe",
            {"expert_used_count": 9},
            "= 9 is more than expert_count = 4",
        ),
        (
            "qwen3-experts",
            "qwen3moe",
            {"expert_weights_norm": False},
            "weights_norm = False is not",
        ),
        ("qwen3-experts", "qwen3moe", {"expert_gating_func": 2}, "expert_gating_func = 2 is not"),
        (
            "granite",
            "granitehybrid",
            {"ssm.group_count": 2},
            "ssm.group_count = 2 is not supported",
        ),
        (
            "granite",
            "granitehybrid",
            {"ssm.conv_kernel": 3},
            "ssm.conv_kernel = 3 is not supported",
        ),
        ("granite", "granitehybrid", {"ssm.inner_size": 100}, "must divide ssm.inner_size = 100"),
        (
            "granite",
            "granitehybrid",
            {"ssm.state_size": 2**30},
            "blk.0.ssm_conv1d.* the wrong shape",
        ),
        ("granite", "granitehybrid", {"attention.head_count_kv": [0, -1, 0]}, "a positive integer"),
        ("granite", "granitehybrid", {"attention.head_count_kv": [0, 2]}, "has 2 numbers, but"),
        (
            "nemotron-h",
            "nemotron_h",
            {"feed_forward_length": [96] * 5},
            "units in a layer of atten",
        ),
        ("nemotron of experts", "nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size = 8 is"),
    ],
)
def test_experts_and_hybrids_that_are_refused(
    family: str, kind: str, changes: dict[str, Any], message: str, family_folder, hybrid_folder,
    tmp_path,
) -> None:  # fmt: skip
    folder = family_folder(family) if family in FAMILIES else hybrid_folder(family)
    a = open_model(folder).architecture
    fields = {f"{kind}.{key}": value for key, value in changes.items()}
    source: Any = open_model(write_gguf(tmp_path / "m.gguf", folder, kind, a, fields))
    with pytest.raises(CheckpointError, match=message):
        _ = source.checked_weights  # before any memory is taken


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("blk.1.ffn_up_exps.weight", None, "tensor 'blk.1.ffn_up_exps.weight' .* is missing"),
        ("blk.1.ffn_up_exps.weight", np.zeros((4, 64, 40), np.float32), "has the wrong shape"),
        ("blk.1.ffn_up_exps.weight", np.zeros((160, 64), np.float32), "has the wrong shape"),
        ("blk.0.ssm_a", np.ones((8, 1), np.float32), "'blk.0.ssm_a' has numbers .* not negative"),
        (
            "blk.0.ssm_conv1d.weight",
            np.zeros((160, 3), np.float32),
            "'blk.0.ssm_conv1d.* the wrong",
        ),
    ],
)
def test_tensors_of_experts_and_hybrids_that_do_not_fit(
    name: str, data: Any, message: str, hybrid_folder, tmp_path
) -> None:
    folder = hybrid_folder("granite-moe")
    a = open_model(folder).architecture
    path = write_gguf(tmp_path / "m.gguf", folder, "granitehybrid", a, tensors={name: data})
    with pytest.raises(CheckpointError, match=message):
        load_model(path, torch.float32, CPU)
