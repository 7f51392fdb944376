"""Hugging Face folders with multi-token prediction: what is read where, and what it computes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoints import CheckpointError, load_model, open_model, safetensors_file
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface_config import read_architecture, write_config
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.checkpoints.mapping import mtp_weights
from megatron_async.checkpoints.safetensors_file import SafetensorsFile
from megatron_async.cli.main import main
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.whole_sequence import WholeSequence, whole_pass
from tests.unit_tests.checkpoints.hybrid_families import edited, their_logits
from tests.unit_tests.checkpoints.mtp_folders import (
    MTP_FAMILIES,
    make_layers,
    make_trunk,
    their_depth,
    write_folder,
)

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 128, (13,), generator=torch.Generator().manual_seed(4)).tolist()
MakeFolder = Callable[[str], tuple[Path, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Name of a family -> its folder, and MTP's tensors in it."""

    @cache
    def make(name: str) -> tuple[Path, dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("mtp") / name
        return folder, write_folder(name, folder)

    return make


@pytest.mark.parametrize("name", MTP_FAMILIES)
def test_a_depth_says_what_transformers_and_vllm_say(name: str, mtp_folder: MakeFolder) -> None:
    """Each tensor is where it should be, and `eh_proj` takes its inputs in the right order."""
    folder, tensors = mtp_folder(name)
    family = MTP_FAMILIES[name]
    loaded = load_model(folder, torch.float32, CPU, with_mtp=True)
    a = loaded.architecture
    assert (a.mtp_pattern, a.mtp_num_depths) == (family.pattern, 1)
    assert a.mtp_hidden_before_norm == family.has_hidden_before_norm
    trunk = make_trunk(name)
    logits, hidden = whole_pass(loaded.model, TOKENS)
    assert hidden is not None
    torch.testing.assert_close(logits, their_logits(trunk, TOKENS), rtol=0, atol=1e-3)
    embedded = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(3))
    view: Any = WholeSequence(loaded.model.config, len(TOKENS))
    with torch.inference_mode():
        found = loaded.model.mtp.layers[0](embedded[:, None], hidden, view).squeeze(1)
    expected = their_depth(name, make_layers(name), tensors, embedded, hidden)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert found.std() > 0.1


@torch.inference_mode()
def _final_hidden(trunk: Any, is_before_norm: bool) -> Tensor:
    """Hidden states of transformers: what stands before or behind the last norm."""
    seen: list[Tensor] = []
    norm = getattr(trunk.model, "norm", None) or trunk.model.norm_f
    norm.register_forward_hook(lambda _m, inputs, output: seen.extend((inputs[0], output)))
    their_logits(trunk, TOKENS)
    return seen[0 if is_before_norm else 1][0]


@pytest.mark.parametrize("name", MTP_FAMILIES)
def test_the_first_depth_gets_the_familys_hidden_state(name: str, mtp_folder: MakeFolder) -> None:
    model = load_model(mtp_folder(name)[0], torch.float32, CPU, with_mtp=True).model
    expected = _final_hidden(make_trunk(name), MTP_FAMILIES[name].has_hidden_before_norm)
    torch.testing.assert_close(whole_pass(model, TOKENS)[1], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", MTP_FAMILIES)
def test_every_tensor_is_read_once_and_nothing_else(name: str, mtp_folder: MakeFolder, monkeypatch):
    folder, tensors = mtp_folder(name)
    source = open_model(folder)
    reads: list[tuple[str, int]] = []
    fill = SafetensorsFile.fill

    def watched(self: Any, name: str, start: int, place: Tensor) -> None:
        reads.append((name, place.numel()))
        fill(self, name, start, place)

    monkeypatch.setattr(SafetensorsFile, "fill", watched)
    monkeypatch.setattr(safetensors_file, "GAP_BYTES", 0)
    load_model(folder, torch.float32, CPU)
    assert not tensors.keys() & {key for key, _ in reads}
    assert source.architecture.num_parameters <= sum(count for _, count in reads)
    reads.clear()
    load_model(folder, torch.float32, CPU, with_mtp=True)
    counts = dict.fromkeys(tensors, 0)
    for key, count in reads:
        counts[key] = counts.get(key, 0) + count
    assert {key: counts[key] for key in tensors} == {k: t.numel() for k, t in tensors.items()}
    assert sum(t.numel() for t in tensors.values()) == source.architecture.mtp_parameters


@pytest.mark.parametrize("name", MTP_FAMILIES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Through a Megatron checkpoint, bit for bit, and without MTP where that is asked for."""
    tensors = write_folder(name, tmp_path / "m", torch.bfloat16)
    expected = open_model(tmp_path / "m").architecture
    convert(tmp_path / "m", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    assert open_model(tmp_path / "back").architecture == expected
    found = load_file(tmp_path / "back" / "model.safetensors")
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key
    for source in ("m", "megatron"):
        for to in ("torch_dist", "huggingface"):
            target = tmp_path / f"{source} {to}"
            convert(tmp_path / source, target, to=to, with_mtp=False)
            assert open_model(target).architecture == expected.without_mtp
            assert not open_model(target).has_mtp_weights
    assert not tensors.keys() & load_file(tmp_path / "m huggingface" / "model.safetensors").keys()
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "c"), "--no-mtp"]) == 0
    assert open_model(tmp_path / "c").architecture == expected.without_mtp


def test_experts_of_a_depth_in_one_tensor(mtp_folder: MakeFolder, tmp_path: Path) -> None:
    """One tensor like published Qwen3.5-MoE's, whatever form the trunk's have."""
    folder, tensors = mtp_folder("qwen3.5-moe")
    edited(folder, tmp_path / "m")
    prefix = "mtp.layers.0.mlp.experts."
    stacked = {key: t for key, t in tensors.items() if not key.startswith(prefix)}
    parts = {
        part: torch.stack([tensors[f"{prefix}{e}.{part}_proj.weight"] for e in range(6)])
        for part in ("gate", "up", "down")
    }
    stacked[prefix + "gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
    stacked[prefix + "down_proj"] = parts["down"]
    replace_mtp(tmp_path / "m", stacked)
    found, expected = (
        dict(load_model(path, torch.float32, CPU, with_mtp=True).model.named_parameters())
        for path in (tmp_path / "m", folder)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def replace_mtp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Other tensors in the shard that holds MTP alone."""
    file = "model-00003-of-00003.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = {k: f for k, f in index["weight_map"].items() if f != file}
    (folder / file).unlink()
    if tensors:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index["weight_map"] = weight_map | dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", MTP_FAMILIES)
def test_missing_weights_are_named_with_a_remedy(name: str, mtp_folder: MakeFolder, tmp_path):
    """All of them, as where a model was tuned without MTP, or one. The model serves without."""
    folder, tensors = mtp_folder(name)
    lost = MTP_FAMILIES[name].names["eh_proj"]
    count = len(tensors)
    for number, kept in enumerate(({}, {k: t for k, t in tensors.items() if k != lost})):
        # The configuration of Qwen3-Next tells nothing.
        told = {"num_nextn_predict_layers": 1} if name == "qwen3-next" else {}
        target = edited(folder, tmp_path / f"m{number}", **told)
        replace_mtp(target, kept)
        load_model(target, torch.float32, CPU)
        some = f"one of {count - len(kept)} of {count}" if kept else f"one of {count} of {count}"
        message = rf"tensor '.*', {some} of .*is missing: use speculative_method='ngram', .*or none"
        with pytest.raises(CheckpointError, match=message) as caught:
            load_model(target, torch.float32, CPU, with_mtp=True)
        assert kept == {} or repr(lost) in str(caught.value)
        assert open_model(target).has_mtp_weights == bool(kept)
    convert(tmp_path / "m0", tmp_path / "converted")
    assert open_model(tmp_path / "converted").architecture.mtp_num_depths == 0
    assert "its weights are not there" in format_info(model_info(tmp_path / "m0"))


def test_tensors_that_do_not_fit(mtp_folder: MakeFolder, tmp_path: Path) -> None:
    folder, tensors = mtp_folder("qwen3.5")
    changes: dict[str, tuple[dict[str, Tensor], str]] = {
        "more": ({"mtp.embed_tokens.weight": torch.zeros(128, 64)},
                 "'mtp.embed_tokens.weight' .*is not part of multi-token prediction .*ngram"),
        "wrong": ({"mtp.fc.weight": torch.zeros(64, 64)}, r"expected \[64, 128\], found \[64, 64"),
        "packed": ({"mtp.fc.weight": torch.zeros(64, 128, dtype=torch.int8)}, "stored as I8"),
    }  # fmt: skip
    for name, (others, message) in changes.items():
        target = edited(folder, tmp_path / name)
        replace_mtp(target, tensors | others)
        load_model(target, torch.float32, CPU)
        with pytest.raises(CheckpointError, match=message):
            load_model(target, torch.float32, CPU, with_mtp=True)


def _read(name: str, mtp_folder: MakeFolder, names: Any = (), **changes: Any) -> ModelArchitecture:
    config = json.loads((mtp_folder(name)[0] / "config.json").read_text()) | changes
    return read_architecture(config, "config.json", names=names)


def test_what_configurations_say(mtp_folder: MakeFolder) -> None:
    names = list(mtp_folder("qwen3-next")[1])
    assert _read("qwen3-next", mtp_folder).mtp_num_depths == 0
    assert _read("qwen3-next", mtp_folder, names).mtp_num_depths == 1
    assert _read("qwen3-next", mtp_folder, num_nextn_predict_layers=2).mtp_num_depths == 2
    assert _read("qwen3-next", mtp_folder, names, num_nextn_predict_layers=0).mtp_pattern == ""
    nemotron = _read("nemotron-3", mtp_folder)
    assert nemotron.mtp_use_repeated_layer  # its one depth is trained as two
    assert not _read("nemotron-3", mtp_folder, num_nextn_predict_layers=2).mtp_use_repeated_layer
    for changes, pattern in (
        ({"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*-*E"}, "*-*E"),
        ({"mtp_layers_block_type": None}, "*E"),
        ({"mtp_layers_block_type": ["mamba", "mlp"]}, "M-"),
    ):
        assert _read("nemotron-3", mtp_folder, **changes).mtp_pattern == pattern
    with pytest.raises(CheckpointError, match="mtp_hybrid_override_pattern = '/E' is not supp"):
        _read(
            "nemotron-3", mtp_folder, mtp_layers_block_type=None, mtp_hybrid_override_pattern="/E"
        )
    with pytest.raises(CheckpointError, match=r"'\*E', but the model has no experts. Set num_next"):
        _read("nemotron-3", mtp_folder, layers_block_type=["mamba", "mlp"])
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers = -1 must be a positive"):
        _read("qwen3.5", mtp_folder, mtp_num_hidden_layers=-1)
    with pytest.raises(CheckpointError, match=r"attention_bias = False .*\(only True\)"):
        _read("mimo", mtp_folder, attention_bias=False)


def test_layers_of_two_depths_have_the_familys_names(mtp_folder: MakeFolder) -> None:
    """Depths of Nemotron-H count their layers on; those of Qwen share norms and `eh_proj`."""
    parts: dict[str, list[str]] = {}
    for name in ("nemotron-3", "qwen3.5"):
        a = replace(_read(name, mtp_folder), mtp_num_depths=2, mtp_use_repeated_layer=False)
        parts[name] = [next(iter(weight.parts)) for weight in mtp_weights(a)]
    assert {"mtp.layers.2.eh_proj.weight", "mtp.layers.3.final_layernorm.weight"} <= set(
        parts["nemotron-3"]
    )
    assert "mtp.layers.3.mixer.gate.weight" in parts["nemotron-3"]
    assert parts["qwen3.5"].count("mtp.fc.weight") == 2
    assert parts["qwen3.5"].count("mtp.layers.1.input_layernorm.weight") == 1


NANO_SIZES = {"hidden": 2688, "expert": 1856, "shared": 3712, "query": 4096, "kv": 256}


def _lightning() -> dict[str, tuple[int, ...]]:
    """The 270 tensors of MTP in NVIDIA-Nemotron-3.5-Lightning-30B-A3B."""
    hidden, expert, shared, query, kv = NANO_SIZES.values()
    first, second = "mtp.layers.0.", "mtp.layers.1."
    found: dict[str, tuple[int, ...]] = {
        first + "eh_proj.weight": (hidden, 2 * hidden),
        first + "mixer.q_proj.weight": (query, hidden),
        first + "mixer.k_proj.weight": (kv, hidden),
        first + "mixer.v_proj.weight": (kv, hidden),
        first + "mixer.o_proj.weight": (hidden, query),
        second + "mixer.gate.weight": (128, hidden),
        second + "mixer.gate.e_score_correction_bias": (128,),
        second + "mixer.shared_experts.up_proj.weight": (shared, hidden),
        second + "mixer.shared_experts.down_proj.weight": (hidden, shared),
    }
    names = (first + "enorm", first + "hnorm", first + "norm", second + "norm")
    found |= {f"{name}.weight": (hidden,) for name in (*names, second + "final_layernorm")}
    for number in range(128):
        found[f"{second}mixer.experts.{number}.up_proj.weight"] = (expert, hidden)
        found[f"{second}mixer.experts.{number}.down_proj.weight"] = (hidden, expert)
    assert len(found) == 270
    return found


def _qwen_27b() -> dict[str, tuple[int, ...]]:
    """The 15 tensors of MTP in Qwen3.5-27B."""
    layer = "mtp.layers.0."
    return {
        "mtp.fc.weight": (5120, 10240),
        "mtp.norm.weight": (5120,),
        "mtp.pre_fc_norm_embedding.weight": (5120,),
        "mtp.pre_fc_norm_hidden.weight": (5120,),
        layer + "input_layernorm.weight": (5120,),
        layer + "post_attention_layernorm.weight": (5120,),
        layer + "mlp.down_proj.weight": (5120, 17408),
        layer + "mlp.gate_proj.weight": (17408, 5120),
        layer + "mlp.up_proj.weight": (17408, 5120),
        layer + "self_attn.k_norm.weight": (256,),
        layer + "self_attn.q_norm.weight": (256,),
        layer + "self_attn.k_proj.weight": (1024, 5120),
        layer + "self_attn.v_proj.weight": (1024, 5120),
        layer + "self_attn.o_proj.weight": (5120, 6144),
        layer + "self_attn.q_proj.weight": (12288, 5120),
    }


QWEN_27B = ModelArchitecture(
    "qwen3_5", 64, 5120, 24, 4, 256, 17408, 248320, 1e-6, 1e7, pattern="G-G-G-*-" * 16,
    rotary_percent=0.25, qk_layernorm=True, attention_output_gate=True,
    layernorm_zero_centered_gamma=True, linear_num_key_heads=16, linear_num_value_heads=48,
    linear_key_head_dim=128, linear_value_head_dim=128, mtp_pattern="*-", mtp_num_depths=1,
)  # fmt: skip


def test_published_lists_of_tensors() -> None:
    """Names and shapes of whole models, from public lists of them."""
    lists = ((DUMMY_SHAPES["nemotron-3-nano-30b-mtp"], _lightning()), (QWEN_27B, _qwen_27b()))
    for a, published in lists:
        found = {name: shape for w in mtp_weights(a) for name, shape in w.parts.items()}
        assert found == published
        assert sum(torch.Size(shape).numel() for shape in found.values()) == a.mtp_parameters


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ("tiny-mtp", {}, r"a llama model with mtp_pattern = '\*-' has no Hugging Face form"),
        ("tiny-hybrid-mtp", {"mtp_hidden_before_norm": True}, "mtp_hidden_before_norm = True"),
        ("tiny-gated-delta", {"mtp_pattern": "*-", "mtp_num_depths": 1}, r"mtp_pattern = '\*-'"),
        ("tiny-gated-delta", {"mtp_pattern": "*E", "mtp_num_depths": 2}, "2 depths has no Hugg"),
    ],
)
def test_what_no_family_can_say(shape: str, changes: dict[str, Any], message: str) -> None:
    a = replace(DUMMY_SHAPES[shape], **changes)
    with pytest.raises(CheckpointError, match=message + ".*convert to torch_dist .*--no-mtp"):
        write_config(a, "bfloat16")
    write_config(a.without_mtp, "bfloat16")


def test_info_shows_it(mtp_folder: MakeFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder, tensors = mtp_folder("nemotron-3")
    count = sum(tensor.numel() for tensor in tensors.values())
    info = model_info(folder, dtype="bfloat16")
    assert (info.mtp_parameters, info.mtp_weight_bytes) == (count, 2 * count)
    assert info.mtp_kv_bytes_per_token == 2 * 2 * 16 * 2
    assert info.parameters == open_model(folder).architecture.num_parameters
    assert main(["info", str(folder), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    line = next(n for n in capsys.readouterr().out.splitlines() if n.startswith("multi-token"))
    assert "1 depth of *E, to be repeated" in line
    assert f"{count:,} parameters" in line
    assert "only with speculative_method='mtp'" in line
    assert model_info("dummy:tiny").mtp_parameters == 0
    assert "multi-token" not in format_info(model_info("dummy:tiny"))
