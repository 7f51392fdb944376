"""GGUF files, and dequantisation against the gguf package, bit for bit."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.gguf import NAMES, GGUFSource
from megatron_async.models.architecture import ModelArchitecture, RopeScaling
from megatron_async.models.rotary import inverse_frequencies
from megatron_async.ops.linear.gguf_blocks import BLOCKS, PLAIN, dequantise
from tests.support.gguf_blocks import blocks_of
from tests.unit_tests.checkpoints.hybrid_families import assert_same_weights, huggingface_state

CPU = torch.device("cpu")
GGUF_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
Q = gguf.GGMLQuantizationType


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the q and k rows of a Llama model."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    folder: Path,
    kind: str,
    a: ModelArchitecture,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    quantisation: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType] = Q.F32,
) -> Path:
    """A GGUF file of a folder's weights; `fields` and `tensors` replace or (None) drop some.
    `quantisation`: of matrices, or by their names; of a K type they are random."""
    writer = gguf.GGUFWriter(path, kind)
    values: dict[str, Any] = {
        f"{kind}.block_count": a.num_layers,
        f"{kind}.context_length": a.max_position_embeddings,
        f"{kind}.embedding_length": a.hidden_size,
        f"{kind}.feed_forward_length": a.ffn_hidden_size,
        f"{kind}.attention.head_count": a.num_attention_heads,
        f"{kind}.attention.head_count_kv": a.num_query_groups,
        f"{kind}.attention.key_length": a.kv_channels,
        f"{kind}.attention.layer_norm_rms_epsilon": a.layernorm_epsilon,
        f"{kind}.rope.freq_base": a.rotary_base,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | dict(fields or {})
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    stored: dict[str, np.ndarray | None] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        rows = tensor.numpy()
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = a.num_attention_heads if stem.endswith("q_proj") else a.num_query_groups
            rows = permute(rows, heads)
        stored[f"{layer}{GGUF_NAMES[stem]}.{suffix}"] = rows
    for name, rows in (stored | dict(tensors or {})).items():
        chosen = quantisation(name) if callable(quantisation) else quantisation
        if rows is not None and rows.ndim == 2 and chosen != Q.F32:
            if chosen.name.endswith("_K"):
                data = blocks_of(chosen, *rows.shape, seed=len(name))
            else:
                data = gguf.quants.quantize(rows, chosen)
            writer.add_tensor(name, data, raw_dtype=chosen)
        elif rows is not None:
            writer.add_tensor(name, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    ("family", "kind"), [("llama-tied", "llama"), ("qwen2", "qwen2"), ("qwen3-tied", "qwen3")]
)
def test_every_architecture_reads_back(family: str, kind: str, family_folder, tmp_path):
    folder = family_folder(family)
    architecture = open_model(folder).architecture
    loaded = load_model(
        write_gguf(tmp_path / "m.gguf", folder, kind, architecture), torch.float32, CPU
    )
    assert loaded.architecture == architecture
    assert_same_weights(
        huggingface_state(loaded.model, architecture), load_file(folder / "model.safetensors")
    )


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
        ({"fields": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type = 'yarn'"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "rope.dimension_count = 8"),
        ({"fields": {"llama.block_count": None}}, "'llama.block_count' is missing"),
        ({"fields": {"llama.block_count": 4}}, "layers.3.input_layernorm.weight' .* is missing"),
        ({"fields": {"llama.block_count": "three"}}, "block_count = 'three' must be a positive"),
        ({"fields": {"llama.block_count": 2}}, r"'model\.layers\.2\..* is not part of a 2-layer"),
        ({"tensors": {"blk.1.attn_v.weight": None}}, "1.self_attn.v_proj.weight' .* is missing"),
        (
            {"tensors": {"blk.1.attn_v.weight": np.zeros((64, 32), np.float32)}},
            r"1.self_attn.v_proj.* has the wrong shape: expected \[32, 64\], found \[64, 32\]",
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
