"""Files of models that want too much: numbers without end, nests, names of files elsewhere."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from megatron_async.checkpoints import CheckpointError, open_model
from megatron_async.checkpoints.info import model_info
from megatron_async.checkpoints.megatron_args import architecture_from_args
from megatron_async.json_objects import LARGEST_JSON, read_object
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.sizes import size_problem
from megatron_async.text.tokenizer import Tokenizer, TokenizerError
from tests.support.gguf_files import write_gguf
from tests.unit_tests.checkpoints.hybrid_families import edited
from tests.unit_tests.checkpoints.test_delta_folders import with_vision
from tests.unit_tests.checkpoints.training_checkpoints import parsed_args, save_run, trained_model

HUGE = 10**12
SIZES = {
    "llama-tied": (
        "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
        "num_key_value_heads", "intermediate_size", "head_dim",
    ),
    "mixtral": ("num_hidden_layers", "num_local_experts"),
    "qwen3-moe": ("num_hidden_layers", "num_local_experts", "moe_intermediate_size"),
}  # fmt: skip
HYBRID_SIZES = {
    "nemotron-3": ("n_routed_experts", "mamba_num_heads", "n_groups", "num_nextn_predict_layers"),
    "granite-moe": ("num_hidden_layers", "num_local_experts", "mamba_n_heads", "mamba_d_state"),
    "bamba": ("num_hidden_layers", "vocab_size"),
    "mamba2": ("num_hidden_layers", "num_heads", "state_size"),
    "qwen3-next": ("num_hidden_layers", "num_experts", "linear_num_value_heads"),
    "qwen3.5": ("num_hidden_layers", "linear_num_key_heads", "mtp_num_hidden_layers"),
}
NESTED = "[" * 200_000


def write_tokenizer(folder: Path) -> None:
    BackendTokenizer(BPE()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")


def refuse_sizes(folder: Path, keys: tuple[str, ...], copy: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in keys:
        for lost in ("layer_types", "layers_block_type"):
            config.pop(lost, None)
        for value in {HUGE, 10**9 if size_problem(key, 10**9) else HUGE}:
            (copy / "config.json").write_text(json.dumps(config | {key: value}))
            with pytest.raises(CheckpointError, match=rf"config.json: .*{key} = {value}"):
                model_info(copy, memory_gb=1)


@pytest.mark.parametrize("family", SIZES)
def test_sizes_of_transformers(family: str, family_folder: Callable[[str], Path], tmp_path):
    copy = Path(shutil.copytree(family_folder(family), tmp_path / "m"))
    refuse_sizes(family_folder(family), SIZES[family], copy)


@pytest.mark.parametrize("family", HYBRID_SIZES)
def test_sizes_of_hybrids(family: str, hybrid_folder, tmp_path: Path) -> None:
    folder = edited(hybrid_folder(family), tmp_path / "m")
    if family.startswith("nemotron"):  # its pattern gives the number of layers
        long = {"hybrid_override_pattern": "M" * 5000, "layers_block_type": "absent"}
        with pytest.raises(CheckpointError, match=r"config.json: num_layers = 5000 is more"):
            model_info(edited(folder, tmp_path / "long", **long), memory_gb=1)
        folder = edited(folder, tmp_path / "pattern", hybrid_override_pattern="MEM*-E")
    refuse_sizes(folder, HYBRID_SIZES[family], tmp_path / "m")


def test_many_experts_of_many_layers(family_folder: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = {"num_local_experts": 16384, "num_hidden_layers": 4096}
    copy = edited(family_folder("mixtral"), tmp_path / "m", **sizes)
    with pytest.raises(CheckpointError, match=r"config.json: num_moe_experts = 16384 in 4096"):
        model_info(copy, memory_gb=1)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_sizes_of_gguf(key: str, family_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = family_folder("llama-tied")
    a = open_model(folder).architecture
    file = write_gguf(tmp_path / "m.gguf", folder, "llama", a, {f"llama.{key}": 10**9})
    with pytest.raises(CheckpointError, match=rf"m.gguf: llama.{key} = 1000000000 is more than"):
        model_info(file, memory_gb=1)


@pytest.mark.parametrize("key", ["num_layers", "hidden_size", "num_experts", "mtp_num_layers"])
def test_sizes_of_training_arguments(key: str) -> None:
    args = vars(parsed_args()) | {key: HUGE}
    with pytest.raises(ValueError, match=f"{key} = {HUGE} is more than"):
        architecture_from_args(args, 96, (), "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4, "moe_layer_freq": [1]}, r"moe_layer_freq = \[1\] must be"),
        ({"num_experts": 4, "moe_layer_freq": 0}, "moe_layer_freq = 0 must be"),
        ({"num_experts": "x"}, "num_experts = 'x' must be"),
        ({"num_experts": 4, "moe_router_load_balancing_type": 3}, "balancing_type = 3 is not"),
        ({"rotary_base": None}, "rotary_base = None must be"),
        ({"rotary_percent": float("nan")}, "rotary_percent = nan must be"),
        ({"layernorm_epsilon": "1e-5"}, "layernorm_epsilon = '1e-5' must be"),
        ({"rotary_percent": 1.5}, "rotary_percent = 1.5 must be at most 1"),
        ({"hybrid_layer_pattern": 3}, "hybrid_layer_pattern = 3 must be a text"),
        (
            {"hybrid_layer_pattern": "*-", "mtp_hybrid_override_pattern": 3},
            "mtp_hybrid_override_pattern = 3 must be a text",
        ),
        ({"kv_channels": -16}, "kv_channels = -16 must be"),
        ({"kv_channels": "16"}, "kv_channels = '16' must be"),
        ({"qk_layernorm": "False"}, "qk_layernorm = 'False' must be True or False"),
        ({"untie_embeddings_and_output_weights": 1}, "output_weights = 1 must be True or False"),
        ({"layernorm_zero_centered_gamma": 0.5}, "zero_centered_gamma = 0.5 must be True"),
        (
            {"num_experts": 4, "moe_router_topk_scaling_factor": -1.0},
            "moe_router_topk_scaling_factor = -1.0 must be",
        ),
        (
            {"num_experts": 4, "moe_shared_expert_intermediate_size": 0.5},
            "moe_shared_expert_intermediate_size = 0.5 must be",
        ),
        ({"softmax_scale": 0.5}, "softmax_scale = 0.5 is not supported"),
        ({"spec": ["mine.layers", "spec"]}, r"spec = \['mine.layers', 'spec'\] is not supported"),
    ],
)
def test_odd_training_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"run: .*{message}"):
        architecture_from_args(vars(parsed_args()) | changes, 96, (), "run")


@pytest.mark.parametrize("key", ["num_layers", "hidden_size", "vocab_size", "num_moe_experts"])
def test_sizes_of_an_architecture(key: str) -> None:
    plain = {"model_type": "llama", "num_layers": 2, "hidden_size": 8, "num_attention_heads": 1}
    plain |= {"num_query_groups": 1, "kv_channels": 8, "ffn_hidden_size": 8, "vocab_size": 9}
    with pytest.raises(ValueError, match=f"{key} = {HUGE}"):
        ModelArchitecture.from_dict(plain | {key: HUGE})


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
     "added_tokens.json", "tokenizer.json", "model.safetensors.index.json"],
)  # fmt: skip
@pytest.mark.parametrize("content", [NESTED, '{"a":' * 100_000, "\xff", "{" * 3])
def test_json_that_is_no_object(name: str, content: str, family_folder, tmp_path):
    copy = Path(shutil.copytree(family_folder("llama-tied"), tmp_path / "m"))
    write_tokenizer(copy)
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    (copy / name).write_bytes(content.encode("latin-1"))
    with pytest.raises((CheckpointError, TokenizerError), match=rf"/m/{name}: not .*readable"):
        model_info(copy, memory_gb=1)


def test_json_without_end(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"{")
    with file.open("r+b") as stream:
        stream.truncate(LARGEST_JSON + 1)
    with pytest.raises(CheckpointError, match=r"config.json: is larger than 64 MiB"):
        read_object(file, CheckpointError)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"config.json: is larger than 64 MiB"):
        read_object(file, CheckpointError)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_other_files_of_a_tokenizer_without_end(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with (tmp_path / name).open("r+b") as stream:
        stream.truncate(1 << 31)
    with pytest.raises(TokenizerError, match=rf"{name}: is larger than \d+ MiB"):
        Tokenizer.from_folder(tmp_path)


def test_nested_arrays_of_gguf(tmp_path: Path) -> None:
    array = int(gguf.GGUFValueType.ARRAY)
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<I", array)
    nest = struct.pack("<IQ", array, 1) * 100_000 + struct.pack("<IQ", 4, 0)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + nest)
    with pytest.raises(CheckpointError, match=r"m.gguf: not a readable GGUF file"):
        _ = open_model(file).architecture


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "iter_0000007"
    args = parsed_args()
    save_run(trained_model(args), folder, args)
    return folder


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd"])
def test_a_checkpoint_that_names_files_elsewhere(name: str, trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "m"))
    index = pickle.loads((copy / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = name
    (copy / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=f"names '{name}', which is no file of this folder"):
        _ = open_model(copy).architecture


def test_a_tracker_without_end(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7" * 10_000)
    with pytest.raises(CheckpointError, match=r"is neither the number of an iteration nor"):
        open_model(tmp_path)


def test_sizes_beside_a_vision_tower(tmp_path: Path) -> None:
    with_vision("qwen3.5", tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config["text_config"]["num_hidden_layers"] = HUGE
    config["text_config"].pop("layer_types")
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"num_hidden_layers = {HUGE} is more than"):
        model_info(tmp_path / "m", memory_gb=1)


def test_lists_without_end(hybrid_folder, family_folder, tmp_path):
    """A list is not searched for each layer, and an error does not repeat all of it."""
    for folder, key, layers in (
        (hybrid_folder("bamba"), "attn_layer_indices", 4096),
        (family_folder("qwen3-moe"), "mlp_only_layers", 4096),
        (family_folder("llama-tied"), "layer_types", 3),
    ):
        changes = {"num_hidden_layers": layers, key: list(range(10**5, 3 * 10**5))}
        copy = edited(folder, tmp_path / key, **changes)
        (copy / "model.safetensors").unlink()
        source = open_model(copy)
        if layers == 3:
            with pytest.raises(CheckpointError, match=r"config.json: layer_types = ") as error:
                _ = source.architecture
            assert len(str(error.value)) < 3000
        else:
            assert source.architecture.num_layers == layers


def test_end_tokens_beyond_the_model(family_folder: Callable[[str], Path], tmp_path, caplog):
    """A special token that the vocabulary lacks gets the next id, which the model cannot make."""
    copy = Path(shutil.copytree(family_folder("llama-tied"), tmp_path / "m"))
    vocab = {f"t{number}": number for number in range(128)}
    BackendTokenizer(BPE(vocab, [])).save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    source = open_model(copy)
    assert source.architecture.eos_token_ids == (2,)
    assert source.tokenizer is not None
    assert source.tokenizer.eod == 2
    assert "end token 128 is not used: the model has tokens 0 to 127" in caplog.text


def test_a_table_of_rope_without_end(family_folder, tmp_path: Path, caplog) -> None:
    """A table of another shape than the model's is not read."""
    folder = Path(shutil.copytree(family_folder("llama-tied"), tmp_path / "m"))
    file = folder / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header, data = file.read_bytes()[8 : 8 + length], file.read_bytes()[8 + length :]
    place = [len(data), len(data) + (1 << 42)]
    table = {"dtype": "F32", "shape": [1 << 40], "data_offsets": place}
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    header = json.dumps(json.loads(header) | {name: table}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header + data)
        stream.truncate(8 + len(header) + place[1])
    open_model(folder).check_stored(with_mtp=False)
    assert f"{name!r} is not the table" in caplog.text
