import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_async import LLM
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.rotary import RotaryTable, inverse_frequencies
from tests.unit_tests.checkpoints.hybrid_families import (
    FAMILIES,
    assert_same_weights,
    edited,
    huggingface_state,
)

CPU = torch.device("cpu")
MODEL = "model.safetensors"


def plain_logits(model: nn.Module, a: ModelArchitecture, ids: Tensor) -> Tensor:
    """The architecture written out, on the parameters of our model: logits `[tokens, vocab]`."""
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    frequencies = inverse_frequencies(a.kv_channels, a.rotary_base, a.rope_scaling)
    table = RotaryTable(frequencies, len(ids), CPU)
    shared = a.num_attention_heads // a.num_query_groups

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], p[name], a.layernorm_epsilon)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * table.cos[:, None] + torch.cat((-second, first), -1) * table.sin[:, None]

    x = p["embedding.word_embeddings.weight"][ids]
    for layer in range(a.num_layers):
        name = f"decoder.layers.{2 * layer}."
        attention = name + "self_attention."
        bias = p.get(attention + "linear_qkv.bias")
        qkv = F.linear(
            norm(x, name + "input_layernorm.weight"), p[attention + "linear_qkv.weight"], bias
        )
        qkv = qkv.view(len(ids), a.num_query_groups, shared + 2, a.kv_channels)
        q, k, v = qkv[:, :, :shared].flatten(1, 2), qkv[:, :, shared], qkv[:, :, shared + 1]
        if a.qk_layernorm:
            q = norm(q, attention + "q_layernorm.weight")
            k = norm(k, attention + "k_layernorm.weight")
        heads = [t.transpose(0, 1) for t in (rotate(q), rotate(k), v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + F.linear(out.transpose(0, 1).flatten(1), p[attention + "linear_proj.weight"])
        name = f"decoder.layers.{2 * layer + 1}."
        hidden = norm(x, name + "pre_mlp_layernorm.weight")
        if a.pattern[2 * layer + 1] == "E":
            x = x + plain_experts(hidden, {n: p[name + "mlp." + n] for n in EXPERT_WEIGHTS}, a)
            continue
        gate, up = F.linear(hidden, p[name + "mlp.linear_fc1.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, p[name + "mlp.linear_fc2.weight"])
    head = "embedding.word_embeddings" if a.tie_word_embeddings else "output_layer"
    return F.linear(norm(x, "decoder.final_norm.weight"), p[head + ".weight"])


EXPERT_WEIGHTS = ("router.weight", "experts.linear_fc1.weight", "experts.linear_fc2.weight")


def plain_experts(x: Tensor, p: dict[str, Tensor], a: ModelArchitecture) -> Tensor:
    """Every expert for every token, most of them with weight 0."""
    router, fc1, fc2 = (p[name] for name in EXPERT_WEIGHTS)
    scores = F.linear(x, router).softmax(1)
    scores = scores * (scores >= scores.sort(1).values[:, -a.moe_router_topk, None])
    if not a.moe_router_pre_softmax:
        scores = scores / scores.sum(1, keepdim=True)
    gate, up = torch.einsum("th,efh->tef", x, fc1).chunk(2, -1)
    return torch.einsum("tef,ehf,te->th", F.silu(gate) * up, fc2, scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_file_bit_for_bit(family: str, family_folder):
    folder = family_folder(family)
    source = open_model(folder)
    assert source.dtype == (torch.bfloat16 if family.endswith("bf16") else torch.float32)
    loaded = load_model(folder, source.dtype, CPU)
    assert_same_weights(
        huggingface_state(loaded.model, loaded.architecture), load_file(folder / MODEL)
    )
    assert sum(p.numel() for p in loaded.model.parameters()) == loaded.architecture.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_the_architecture_computes_what_transformers_computes(family: str, family_folder):
    from transformers import AutoModelForCausalLM

    folder = family_folder(family)
    ids = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = load_model(folder, torch.float32, CPU)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(
        plain_logits(loaded.model, loaded.architecture, ids), expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_written_folders_load_in_transformers_with_equal_logits(
    family: str, family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = family_folder(family)
    source = open_model(folder)
    loaded = load_model(folder, source.dtype, CPU)
    save_huggingface(loaded.model, loaded.architecture, None, tmp_path, shard_bytes=60_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load_model(tmp_path, source.dtype, CPU)
    assert again.architecture == loaded.architecture
    assert_same_weights(
        huggingface_state(again.model, again.architecture), load_file(folder / MODEL)
    )
    ids = torch.arange(100)[None]
    logits = []
    for path in (folder, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.dtype == source.dtype
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_spelling_of_transformers_4(family_folder: Callable[[str], Path], tmp_path: Path) -> None:
    expected = open_model(family_folder("llama3-rope")).architecture
    assert expected.rope_scaling is not None
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = edited(
        family_folder("llama3-rope"),
        tmp_path,
        rope_parameters="absent",
        rope_theta=500000.0,
        rope_scaling=scaling,
        head_dim="absent",
        num_key_value_heads="absent",
    )
    assert open_model(folder).architecture == expected


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 32}, 32),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3,
                   "layer_types": None}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0,
                   "layer_types": None}, 32),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1,
                   "layer_types": None}, (0, 32, 32)),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True,
                   "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
         (32, 0, 32)),
    ],
)  # fmt: skip
def test_sliding_window_is_recorded_where_it_is_active(
    family: str,
    changes: dict[str, Any],
    window: int | tuple[int, ...] | None,
    family_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = open_model(edited(family_folder(family), tmp_path / "in", **changes))
    windows = window if isinstance(window, tuple) else (window or 0,) * 3
    assert source.architecture.attention_windows == windows
    loaded = load_model(tmp_path / "in", torch.float32, CPU)
    save_huggingface(loaded.model, loaded.architecture, None, tmp_path / "out")
    assert open_model(tmp_path / "out").architecture == source.architecture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*is not supported; families that are: .*llama",
        ),
        ({"architectures": "absent", "model_type": "gemma3"}, "model_type = 'gemma3'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor = 0 must be a positive"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one set for all layers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor = None"),
        ({"rope_parameters": {"rope_theta": "many"}}, "rope_theta = 'many'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*'hqq'"),
        ({"hidden_size": "absent"}, "hidden_size = None must be a positive integer"),
        ({"num_hidden_layers": -2}, "num_hidden_layers = -2"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
    ],
)
def test_unsupported_configuration_names_the_value(
    changes: dict[str, Any], message: str, family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(family_folder("llama-tied"), tmp_path, **changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=message) as error:
        _ = open_model(folder).architecture
    assert str(folder) in str(error.value)


def test_generation_settings_of_a_folder_without_a_tokenizer(family_folder, tmp_path, caplog):
    folder = edited(family_folder("llama-tied"), tmp_path)
    settings = {"do_sample": True, "temperature": 0.5, "num_beams": 3, "eos_token_id": [2, 5]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING, "megatron_async"):
        with LLM(str(folder), device="cpu", max_requests=1, num_kv_blocks=2) as llm:
            assert llm.default_sampling_params().temperature == 0.5
        assert open_model(folder).architecture.eos_token_ids == (2, 5)
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "num_beams" in text] == [
        f"{folder}: its generation_config has num_beams = 3: not honoured here."
    ]


def _truncate(folder: Path) -> None:
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(data[: len(data) // 2])


def _truncate_header(folder: Path) -> None:
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:100])


def _scramble_header(folder: Path) -> None:
    data = bytearray((folder / MODEL).read_bytes())
    data[20:40] = b"\xff" * 20
    (folder / MODEL).write_bytes(data)


def _tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / MODEL)
        change(tensors)
        save_file(tensors, folder / MODEL)

    return damage


def _shard_missing(folder: Path) -> None:
    index = {
        "weight_map": dict.fromkeys(load_file(folder / MODEL), "model-00001-of-00002.safetensors")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / MODEL).unlink()


def _shard_incomplete(folder: Path) -> None:
    index = {"weight_map": {**dict.fromkeys(load_file(folder / MODEL), MODEL), "ghost": MODEL}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors: not a readable safetensors file, truncated or corrupt"),
        (_truncate_header, "truncated or corrupt"),
        (_scramble_header, "truncated or corrupt"),
        (_tensors(lambda t: t.pop(K)), f"tensor '{K}' of shape \\[32, 64\\] is missing"),
        (
            _tensors(lambda t: t.update({K: torch.zeros(64, 32)})),
            f"'{K}' has the wrong shape: expected \\[32, 64\\], found \\[64, 32\\]",
        ),
        (_tensors(lambda t: t.update(odd=torch.zeros(1))), "tensor 'odd' .* is not part of"),
        (
            _tensors(lambda t: t.update({K: torch.zeros(32, 64, dtype=torch.int8)})),
            f"'{K}' is stored as I8",
        ),
        (_shard_missing, "model-00001-of-00002.safetensors: is missing"),
        (_shard_incomplete, "lacks tensor 'ghost'"),
        (lambda f: (f / MODEL).rename(f / "pytorch_model.bin"), "holds pytorch_model.bin"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not readable as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    ],
)
def test_damaged_files_are_named(
    damage: Callable[[Path], Any],
    message: str,
    family_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(family_folder("llama-tied"), folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32, CPU)


def test_a_model_of_another_architecture_is_not_filled(family_folder: Callable[[str], Path]):
    other = load_model(family_folder("qwen2"), torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"linear_qkv.bias.* has no counterpart|output_layer"):
        open_model(family_folder("llama-tied")).load_weights(other.model)
