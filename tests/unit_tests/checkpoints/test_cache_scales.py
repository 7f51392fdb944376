"""Scales of keys and values in a folder: by every name, for every rank; and what `auto` follows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_async import LLM
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.cache_scales import load_cache_scales
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import HuggingFaceSource
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.quantised import KEYS
from megatron_async.checkpoints.source import cache_dtype
from megatron_async.errors import ConfigurationError
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.ops.attention.narrow_cache import scales_of
from tests.support.quantised_folders import FORMATS, quantised_folder

CPU = torch.device("cpu")
MODEL = "dummy:qwen3:layers=2,hidden=64,heads=4,groups=2,head=16,ffn=64,vocab=64"
LAYERS = [f"model.layers.{number}.self_attn." for number in range(2)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "m"
    convert(MODEL, folder, to="huggingface", dtype="float32")
    return folder


def with_scales(plain: Path, target: Path, scales: dict[str, Tensor]) -> Path:
    """The model in FP8 with more tensors."""
    return quantised_folder(plain, target, "modelopt fp8", more=scales)


def scales_of_layers(model: torch.nn.Module) -> list[Tensor | None]:
    return [each.cache_scales for each in model.modules() if isinstance(each, PagedSelfAttention)]


@pytest.mark.parametrize(
    "names",
    [
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_scale", "v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("kv_scale",),
    ],
    ids=lambda names: names[0],
)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)])
def test_every_name_and_shape(
    names: tuple[str, ...], shape: tuple[int, ...], plain: Path, tmp_path: Path
) -> None:
    """Break it: keys' scales for values, or of the other layer."""
    count = torch.Size(shape).numel()
    stored = {
        f"{layer}{name}": torch.rand(count).reshape(shape) + number + 10 * place
        for number, layer in enumerate(LAYERS)
        for place, name in enumerate(names)
    }
    folder = with_scales(plain, tmp_path / "m", stored)
    found = scales_of_layers(load_model(folder, torch.float32, CPU).model)
    for layer, scales in zip(LAYERS, found, strict=True):
        keys, values = (stored[layer + name].reshape(-1).expand(2) for name in (names * 2)[:2])
        assert scales is not None
        torch.testing.assert_close(scales, scales_of(keys, values), rtol=0, atol=0)


def test_a_rank_takes_the_scales_of_its_heads(plain: Path, tmp_path: Path) -> None:
    names = {LAYERS[0] + "k_scale": torch.tensor([1.0, 2.0]), LAYERS[0] + "v_scale": torch.ones(2)}
    source = open_model(with_scales(plain, tmp_path / "m", names))
    assert isinstance(source, HuggingFaceSource)
    model = load_model(plain, torch.float32, CPU).model
    wanted = weights(source.architecture, Shard(1, 2))
    load_cache_scales(model, wanted, source._tensors.scales[KEYS], source._files.tensor)
    first, second = scales_of_layers(model)
    assert second is None
    assert first is not None
    assert first.tolist() == [[2.0], [1.0], [0.5], [1.0]]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, r"k_scale' has the shape \[3\]"),
        ({"k_scale": torch.ones(1), "v_scale": torch.zeros(1)}, "v_scale' has a scale that is no"),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor(torch.nan)}, "no number from"),
        (
            {"kv_scale": torch.tensor(1e30)},
            "kv_scale' has a scale that is no number from 6e-08 to 2",
        ),
        ({"kv_scale": torch.tensor([1.0, 1e-30])}, "use kv_cache_dtype='model'"),
        ({"kv_scale": torch.ones(1, dtype=torch.int32)}, "kv_scale' is stored as I32"),
        ({"k_scale": torch.ones(1)}, "k_scale' has no counterpart"),
    ],
)
def test_damaged_scales_are_named(
    scales: dict[str, Tensor], message: str, plain: Path, tmp_path: Path
) -> None:
    stored = {LAYERS[1] + name: scale for name, scale in scales.items()}
    with pytest.raises(CheckpointError, match=message):
        load_model(with_scales(plain, tmp_path / "m", stored), torch.float32, CPU)
    # What the message advises.
    with LLM(str(tmp_path / "m"), device="cpu", kv_cache_dtype="model") as llm:
        assert llm.engine.context.config.kv_cache_dtype == "model"


def test_auto_follows_the_files(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An FP8 cache that the recipe names; scales alone, without a word, leave the model's dtype."""
    scales = {LAYERS[0] + "kv_scale": torch.tensor(0.5)}
    narrow = with_scales(plain, tmp_path / "m", scales)
    sizes = {"max_requests": 2, "num_kv_blocks": 4, "device": "cpu"}
    with LLM(str(narrow), **sizes) as llm:
        config, cache = llm.engine.context.config, llm.engine.context.gpu_view.kv_cache
        assert config.kv_cache_dtype == "fp8"
        assert [cache.scales_of_layer(layer)[0, 0].item() for layer in range(2)] == [0.5, 1.0]
        assert cache.layer(0)[0].dtype == torch.float8_e4m3fn
    assert "no scales for 1 of 2 layers" in caplog.text
    for folder, asked in (narrow, "model"), (plain, "auto"), (plain, None):
        settings = {} if asked is None else {"kv_cache_dtype": asked}
        with LLM(str(folder), **sizes, **settings) as llm:
            assert llm.engine.context.config.kv_cache_dtype == "model"
            assert llm.engine.context.gpu_view.kv_cache.scales is None
    form = FORMATS["modelopt fp8"]
    without = {key: value for key, value in form.config.items() if key != "kv_cache_scheme"}
    other = quantised_folder(
        plain, tmp_path / "other", form._replace(config=without), more=scales
    )  # fmt: skip
    assert cache_dtype("auto", open_model(other)) == "model"
    found = open_model(other).quantised
    assert found is not None
    assert "keys and values (not described, 1 scales in the files): served in the" in str(found)


def test_info_counts_the_bytes(plain: Path, tmp_path: Path) -> None:
    narrow = with_scales(plain, tmp_path / "m", {})
    of_file, wide, asked = (
        model_info(folder, memory_gb=1, dtype="bfloat16", kv_cache_dtype=dtype)
        for folder, dtype in ((narrow, "auto"), (narrow, "model"), (plain, "fp8_e4m3"))
    )
    assert 2 * of_file.kv_bytes_per_token == wide.kv_bytes_per_token
    assert of_file.kv_bytes_per_token == asked.kv_bytes_per_token
    assert of_file.kv_tokens > 1.8 * wide.kv_tokens
    assert "KV cache, fp8" in format_info(of_file)
    with pytest.raises(ConfigurationError, match="kv_cache_dtype='fp4' is unknown"):
        model_info(plain, memory_gb=1, kv_cache_dtype="fp4")
    assert "fp8 " not in format_info(wide).split("KV cache")[1][:5]


def test_convert_tells_that_scales_are_left_out(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = with_scales(plain, tmp_path / "m", {LAYERS[0] + "kv_scale": torch.tensor(0.5)})
    convert(plain, tmp_path / "silent", to="huggingface")
    assert "not written" not in caplog.text
    convert(narrow, tmp_path / "told", to="huggingface")
    assert "scales of keys and values are not written" in caplog.text
    assert cache_dtype("auto", open_model(tmp_path / "told")) == "model"
