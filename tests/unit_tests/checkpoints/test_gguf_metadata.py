"""GGUF's metadata: each key is read, refused by its name, or known to change nothing."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.gguf_metadata import HARMLESS, ONLY
from megatron_async.models.architecture import RopeScaling
from tests.support.gguf_files import write_gguf

Make = Callable[..., Path]
READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
}  # fmt: skip
"""What the architecture is made from."""


def keys_of(kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if isinstance(value, type):
            yield from keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}.") and name.isupper():
            yield value.removeprefix("{arch}.")


PUBLISHED = sorted({key.format(dense="dense_2") for key in keys_of(gguf.Keys)} - READ)
"""Every key behind an architecture's prefix that the gguf package knows."""


@pytest.fixture
def make(family_folder: Callable[[str], Path], tmp_path: Path) -> Make:
    folder = family_folder("llama-tied")
    a = open_model(folder).architecture

    def write(fields: dict[str, Any], **changes: Any) -> Path:
        return write_gguf(tmp_path / "m.gguf", folder, "llama", a, fields, **changes)

    return write


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_key(name: str, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """With a value that no model has by chance it is refused by name, told, or harmless."""
    with caplog.at_level(logging.WARNING, "megatron_async"):
        if name in HARMLESS:
            _ = open_model(make({f"llama.{name}": 7})).architecture
            assert not caplog.records
            return
        said = ""
        try:
            _ = open_model(make({f"llama.{name}": 0.375})).architecture
        except CheckpointError as error:
            said = str(error)
    assert f"llama.{name} = 0.375" in said if said else f"llama.{name}" in caplog.text


@pytest.mark.parametrize("name", sorted(ONLY))
def test_values_that_change_nothing(name: str, make: Make, caplog):
    plain = open_model(make({})).architecture
    with caplog.at_level(logging.WARNING, "megatron_async"):
        for value in ONLY[name]:
            number = value if isinstance(value, bool) else float(value)
            assert open_model(make({f"llama.{name}": number})).architecture == plain
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, RopeScaling(4.0, kind="linear")),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, 4.0),
        ({"rope.scale_linear": 2.5}, 2.5),
        ({"rope.scale_linear": 2.5, "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 2.5}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0, "rope.scaling.finetuned": True}, 4.0),
        ({"rope.freq_base": None}, None),
    ],
)
def test_scaling_of_rope_is_that_of_llama_cpp(fields: dict[str, Any], scaling: Any, make, caplog):
    with caplog.at_level(logging.WARNING, "megatron_async"):
        found = open_model(make({f"llama.{key}": value for key, value in fields.items()}))
        architecture = found.architecture
    expected = RopeScaling(scaling, kind="linear") if isinstance(scaling, float) else scaling
    assert architecture.rope_scaling == expected
    assert architecture.rotary_base == 10000.0
    passed_over = fields == {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert len(caplog.records) == passed_over


def test_a_factor_without_a_type_computes_what_transformers_computes(make: Make, tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.support.whole_sequence import whole_logits

    loaded = load_model(
        make({"llama.rope.scaling.factor": 4.0}), torch.float32, torch.device("cpu")
    )
    convert(str(tmp_path / "m.gguf"), tmp_path / "hf", "huggingface")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.rope_parameters["rope_type"] == "linear"
    assert theirs.config.rope_parameters["factor"] == 4.0
    tokens = [1, 5, 23, 70, 99, 3, 64] * 3
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(whole_logits(loaded.model, tokens), expected, rtol=0, atol=1e-4)
    assert open_model(tmp_path / "hf").architecture.rope_scaling == RopeScaling(4.0, kind="linear")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ({"llama.rope.scaling.factor": -2.0}, "rope.scaling.factor = -2.0 must be a positive"),
        ({"llama.rope.scaling.factor": "4"}, "rope.scaling.factor = '4' must be a positive"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base = nan must be a positive"),
        ({"llama.rope.new_kind": 1}, "rope.new_kind = 1 is not known, and may change"),
        ({"llama.attention.value_length": 32}, "attention.value_length = 32 is not supported"),
        ({"llama.attention.scale": 0.5}, "attention.scale = 0.5 is not supported .only 0.25"),
        ({"llama.attention.causal": False}, "attention.causal = False is not supported"),
        ({"llama.attention.layer_norm_epsilon": 0.1}, "layer_norm_epsilon = 0.1.* .only 1e-06"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"llama.vocab_size": 127}, "vocab_size = 127 is not supported .only 128"),
        ({"llama.feed_forward_length": [96, 96, 64]}, r"= \[96, 96, 64\] is not supported"),
        ({"llama.attention.head_count_kv": [2, 0, 2]}, r"head_count_kv = \[2, 0, 2\] is"),
        ({"llama.attention.head_count_kv": [2, 2]}, "kv has 2 numbers, but block_count is 3"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id = 'x' must be a token's id"),
        ({"tokenizer.ggml.bos_token_id": float("inf")}, "bos_token_id = inf must be a token's"),
        ({"general.type": "adapter"}, "general.type = 'adapter' is not supported"),
        ({"general.type": "imatrix"}, "general.type = 'imatrix' is not supported"),
        ({"adapter.lora.alpha": 16.0}, "has adapter.lora.alpha: it is an adapter"),
        ({"clip.has_vision_encoder": True}, "has clip.has_vision_encoder: it is the vision"),
        ({"split.count": 2, "split.no": 0}, "split.count = 2 means .* several files"),
        ({"general.quantization_version": 1}, "general.quantization_version = 1 is not supp"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], message: str, make: Make):
    with pytest.raises(CheckpointError, match=f"m.gguf: .*{message}"):
        _ = open_model(make(fields)).architecture


def test_what_is_about_the_file_is_not_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    fields = {
        "general.name": "m", "general.license.link": "x", "general.base_model.0.name": "b",
        "general.tags": ["a"], "general.file_type": 7, "general.quantization_version": 2,
        "general.sampling.temp": 0.5, "quantize.imatrix.file": "f", "split.count": 1,
        "split.no": 0, "llama.vocab_size": 128, "llama.attention.scale": 0.25,
        "llama.attention.layer_norm_epsilon": 1e-6, "llama.tensor_data_layout": "Meta AI pth",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "megatron_async"):
        _ = open_model(make(fields)).architecture
        assert not caplog.records
        _ = open_model(make({"llama.some_new_key": 3, "other.key": "x"})).architecture
    assert "nothing is known of llama.some_new_key, other.key in a llama model" in caplog.text


@pytest.mark.parametrize("count", [127, 129])
def test_another_number_of_tokens_than_rows(count: int, make: Make) -> None:
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(count)],
        "tokenizer.ggml.merges": ["t 1"],
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=rf"tokens has {count} entries, .* has 128 rows"):
        _ = open_model(make(fields)).tokenizer


def test_scaling_in_two_ways(make: Make) -> None:
    factors = np.ones(8, np.float32) * 2
    with pytest.raises(CheckpointError, match=r"scaled by 4.0 and by rope_freqs.weight"):
        _ = open_model(
            make({"llama.rope.scaling.factor": 4.0}, tensors={"rope_freqs.weight": factors})
        ).architecture


def test_bytes_in_the_other_order(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"bytes are in the other order"):
        _ = open_model(tmp_path / "m.gguf").architecture
