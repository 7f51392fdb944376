"""Quantised folders as they are published: every format's values, for every rank and family, by
formulas written in `tests/support/quantised_folders.py`; and what is refused, and what is told."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megatron_async.ops.linear.stored_weight as stored_weight
from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import HuggingFaceSource
from megatron_async.checkpoints.info import format_info, model_info
from megatron_async.checkpoints.mapping import Shard, weights
from tests.support.quantised_folders import (
    BLOCKS,
    FORMATS,
    MODEL,
    Format,
    fp8,
    is_matrix,
    nvfp4,
    quantised_folder,
)
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import assert_same_weights
from tests.unit_tests.checkpoints.mtp_folders import write_folder
from tests.unit_tests.checkpoints.test_delta_folders import with_vision

CPU = torch.device("cpu")
DENSE = "dummy:qwen3:layers=1,hidden=256,heads=4,groups=2,head=96,ffn=384,vocab=64"
"""Keys have 192 rows, so a block of 128 x 128 is short; two ranks cut q, k, v and the MLP within
blocks."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "m"
    convert(DENSE, folder, to="huggingface", dtype="float32")
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, torch.float32, CPU).model.named_parameters())


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_of_the_formulas(kind: str, dense: Path, tmp_path: Path) -> None:
    folder = quantised_folder(dense, tmp_path / "m", kind)
    assert_same_weights(weights_of(folder), weights_of(tmp_path / "m-plain"))


SPREAD = ("fp8 blocks", "modelopt nvfp4", "compressed int4 zeros", "awq", "gptq zeros")
"""Formats that cut each in another way: in blocks, within words of inputs or of outputs."""


def parts_of(folder: Path, shard: Shard) -> dict[str, Tensor]:
    source = open_model(folder)
    held = {w.name: torch.empty(w.shape) for w in weights(source.architecture, shard)}
    source.load_into(held, shard)
    return held


@pytest.mark.parametrize("kind", SPREAD)
def test_each_rank_decodes_its_part_by_slices(
    kind: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than a slice at once."""
    folder = quantised_folder(dense, tmp_path / "m", kind)
    sizes: list[int] = []
    values = stored_weight.StoredWeight.values

    def recorded(*arguments: Any) -> Tensor:
        found = values(*arguments)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(stored_weight.StoredWeight, "values", recorded)
    monkeypatch.setattr(stored_weight, "SLICE_VALUES", 1 << 12)
    for rank in range(2):
        found = parts_of(folder, Shard(rank, 2))
        assert_same_weights(found, parts_of(tmp_path / "m-plain", Shard(rank, 2)))
    assert max(sizes) == 128 * 256, "the largest part of a rank is 256 x 192"


@pytest.mark.parametrize("kind", FORMATS)
def test_any_region_is_cut_out_of_blocks_groups_and_words(kind: str, dense: Path, tmp_path: Path):
    source = open_model(quantised_folder(dense, tmp_path / "m", kind))
    assert isinstance(source, HuggingFaceSource)
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = load_file(tmp_path / "m-plain" / MODEL)[name]
    for region in ((slice(37, 101), slice(5, 77)), (slice(191, 192), slice(255, 256))):
        assert torch.equal(source.read_tensor(name, region, CPU), whole[region])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*SPREAD, "compressed mxfp4", "fp8 blocks e8m0", "modelopt fp8"])
def test_values_on_a_gpu_are_those_on_the_cpu(kind: str, dense: Path, tmp_path: Path) -> None:
    folder = quantised_folder(dense, tmp_path / "m", kind)
    model = load_model(folder, torch.bfloat16, torch.device("cuda")).model
    expected = {name: weight.bfloat16() for name, weight in weights_of(folder).items()}
    assert_same_weights({n: p.detach().cpu() for n, p in model.named_parameters()}, expected)


def mixed(w: Tensor) -> Any:
    """FP8 where inputs are no groups of 16, else NVFP4; by Model-Optimizer's MIXED_PRECISION."""
    if w.size(1) % 16:
        return fp8(w, 0, 0, ".weight_scale", shape=lambda s: s.reshape(()))
    return nvfp4(w, is_divided=False)


MIXED = Format(
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
    },
    mixed,
)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3-tied", "compressed channel"),
        ("qwen3-moe", "fp8 blocks bf16"),
        ("qwen3-moe", "modelopt fp8"),
        ("nemotron-3", "modelopt fp8"),
        ("nemotron-3", MIXED),
        ("qwen3.5-moe", "fp8 blocks"),
    ],
    ids=["dense", "experts", "experts by tensor", "hybrid", "hybrid mixed", "gated experts"],
)
def test_engines_say_what_the_plain_model_says(
    family: str, kind: str | Format, family_folder, hybrid_folder, tmp_path: Path
) -> None:
    """Experts one by one, a hybrid's mixers, shared experts; two ranks that share experts."""
    plain = (family_folder if family.startswith("qwen3-") else hybrid_folder)(family)
    folder = quantised_folder(plain, tmp_path / "m", kind)
    params = SamplingParams(
        num_tokens_to_generate=8, temperature=0.0, termination_id=-1, return_log_probs=True
    )
    said = []
    for each in (folder, tmp_path / "m-plain"):
        sizes = {"max_tokens": 32, "max_requests": 2, "kv_cache_dtype": "model"}
        with LLM(str(each), device="cpu", **sizes) as llm:
            requests = llm.generate([[5, 9, 17], list(range(30, 50))], params)
            said.append([(r.generated_tokens, r.generated_log_probs) for r in requests])
    assert said[0] == said[1]
    shard = Shard(1, 2, 1, 2)
    assert_same_weights(parts_of(folder, shard), parts_of(tmp_path / "m-plain", shard))


def test_experts_in_one_tensor_of_mxfp4(family_folder, tmp_path: Path) -> None:
    """gpt-oss's tensors, in a family that is served; the values are transformers' own."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    family = family_folder("qwen3-moe")
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    config = json.loads((family / "config.json").read_text()) | {
        "hidden_size": 64, "moe_intermediate_size": 32,
    }  # fmt: skip
    source = open_model(family)
    state = {n: torch.zeros(s) for n, s in source.tensor_shapes.items() if ".experts." not in n}
    generator = torch.Generator().manual_seed(1)
    plain = dict(state)
    for layer in (0, 2):
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            blocks = torch.randint(256, (4, rows, columns // 32, 16), generator=generator)
            scales = torch.randint(110, 125, (4, rows, columns // 32), generator=generator)
            base = f"model.layers.{layer}.mlp.experts.{name}"
            state[f"{base}_blocks"] = blocks.to(torch.uint8)
            state[f"{base}_scales"] = scales.to(torch.uint8)
            theirs = convert_moe_packed_tensors(
                state[f"{base}_blocks"], state[f"{base}_scales"], dtype=torch.float32
            )
            plain[base] = theirs.transpose(1, 2).contiguous()  # `[experts, inputs, outputs]`
    for folder, tensors, more in (
        (stacked, state, {"quantization_config": {"quant_method": "mxfp4"}}),
        (tmp_path / "plain", plain, {}),
    ):
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / MODEL, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | more))
    assert_same_weights(weights_of(stacked), weights_of(tmp_path / "plain"))


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 tensor"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """With rows and columns that blocks divide; with others transformers takes other blocks."""
    from transformers import AutoModelForCausalLM

    plain = tmp_path / "plain"
    shape = "dummy:qwen3:layers=1,hidden=256,heads=4,groups=2,head=64,ffn=384,vocab=64"
    convert(shape, plain, to="huggingface", dtype="float32")
    folder = quantised_folder(plain, tmp_path / "m", kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = [1, 5, 23, 60, 9]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = whole_logits(load_model(folder, torch.float32, CPU).model, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_heads_and_embeddings_that_are_quantised(dense: Path, tmp_path: Path) -> None:
    """A head of its own, quantised; and an embedding that is the head's too."""
    folder = quantised_folder(
        dense, tmp_path / "m", "awq", lambda n, t: is_matrix(n, t) or n == "lm_head.weight"
    )
    assert "lm_head.qweight" in load_file(folder / MODEL)
    assert_same_weights(weights_of(folder), weights_of(tmp_path / "m-plain"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not open_model(folder).architecture.tie_word_embeddings
    stored = load_file(folder / MODEL)
    save_file({n: t for n, t in stored.items() if "lm_head" not in n}, folder / MODEL)
    assert open_model(folder).architecture.tie_word_embeddings
    del stored["model.embed_tokens.weight"]
    save_file(stored, folder / MODEL)
    found = weights_of(folder)["embedding.word_embeddings.weight"]
    assert torch.equal(found, load_file(tmp_path / "m-plain" / MODEL)["lm_head.weight"])


@pytest.mark.parametrize("inside", [None, "text_config"])
def test_a_language_model_beside_a_vision_tower(inside: str | None, tmp_path: Path) -> None:
    with_vision("qwen3.5", tmp_path / "plain")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", "fp8 blocks", inside=inside)
    assert any("language_model" in n and n.endswith("_inv") for n in load_file(folder / MODEL))
    assert_same_weights(weights_of(folder), weights_of(tmp_path / "m-plain"))


@pytest.mark.parametrize("name", ["qwen3.5-moe", "nemotron-3"])
def test_multi_token_prediction_is_quantised_too(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path / "plain")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", "compressed channel")
    assert any(n.startswith("mtp.") and n.endswith("_scale") for n in load_file(folder / MODEL))
    found, plain = (
        dict(load_model(each, torch.float32, CPU, with_mtp=True).model.named_parameters())
        for each in (folder, tmp_path / "m-plain")
    )
    assert any(name.startswith("mtp.") for name in found)
    assert_same_weights(found, plain)
    assert open_model(folder).has_mtp_weights


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / MODEL)
    edit(tensors)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})


K = "model.layers.0.self_attn.k_proj"


def set_to(end: str, value: Any) -> Callable[[dict[str, Tensor]], Any]:
    """Another tensor in a layer, or none; a number: in place of one value."""

    def edit(tensors: dict[str, Tensor]) -> None:
        if isinstance(value, float):
            flat = tensors[K + end].float()
            flat.view(-1)[0] = value
            tensors[K + end] = flat.to(tensors[K + end].dtype)
        elif value is None:
            del tensors[K + end]
        else:
            tensors[K + end] = value

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        (
            "fp8 blocks",
            set_to(".weight_scale_inv", None),
            r"k_proj': .weight .float8_e4m3fn. are no wh",
        ),
        ("fp8 blocks", set_to(".weight_scale_inv", float("nan")), "k_proj.weight_scale_inv' has v"),
        (
            "fp8 blocks",
            set_to(".weight", float("nan")),
            "k_proj.weight' has values that are no fin",
        ),
        (
            "fp8 blocks",
            set_to(".weight_scale_inv", torch.ones(3, 2)),
            r"scale \[3, 2\] .*128 x 128",
        ),
        ("fp8 blocks", set_to(".weight_scale_inv", torch.ones(1)), r"scale \[1\] .*\[192, 256\]"),
        (
            "fp8 blocks",
            set_to(".weight", torch.ones(192, 256)),
            r".weight \(float32\), .weight_scale_i",
        ),
        ("fp8 blocks", set_to(".weight_scale", torch.ones(1)), "are no whole weight of fp8 .FP8: "),
        (
            "fp8 blocks",
            set_to(".weight", torch.ones(192, 128).to(torch.float8_e4m3fn)),
            r"192, 128",
        ),
        ("fp8 blocks", set_to(".weight", torch.ones(192, 256).to(torch.float8_e5m2)), "F8_E5M2"),
        ("fp8 blocks", set_to(".weight", torch.ones(192, 256, dtype=torch.int8)), r"\(int8\)"),
        ("fp8 blocks e8m0", set_to(".weight_scale_inv", float("nan")), "no finite numbers"),
        ("modelopt nvfp4", set_to(".weight_scale_2", torch.ones(2)), r"outer \[2\]"),
        (
            "modelopt nvfp4",
            set_to(".weight_scale_2", torch.tensor(float("inf"))),
            "weight_scale_2'",
        ),
        ("compressed nvfp4", set_to(".weight_global_scale", torch.zeros(1)), "global_scale' is no"),
        (
            "compressed nvfp4",
            set_to(".weight_global_scale", torch.full((1,), float("inf"))),
            "global_scale' is no number to divide by",
        ),
        ("compressed int4 zeros", set_to(".weight_zero_point", None), "there are no zeros, which"),
        ("gptq", set_to(".bias", torch.zeros(192, 2)), "k_proj.bias' .* is not part of"),
        ("compressed int4", set_to(".weight_shape", torch.tensor([192, 2])), r"weight \[192, 2\]"),
        ("compressed int4", set_to(".weight_shape", torch.ones(1 << 8).long()), "tells none"),
        ("compressed int4", set_to(".weight_scale", torch.ones(192, 5).half()), "groups of 32"),
        (
            "compressed int4",
            set_to(".weight_g_idx", torch.arange(256).flip(0).int()),
            r"k_proj.weight_g_idx' .*act-order",
        ),
        ("gptq", set_to(".g_idx", torch.arange(256).int() % 2), r"k_proj.g_idx' .*act-order"),
        ("gptq", set_to(".g_idx", torch.arange(8).int()), r"order \[8\]"),
        ("gptq", set_to(".qweight", torch.ones(8, dtype=torch.int32)), r"\[8\] are no matrix"),
        ("gptq", set_to(".qzeros", None), "no whole weight of gptq"),
        ("awq", set_to(".scales", torch.ones(2, 191).half()), r"scale \[2, 191\]"),
        ("awq", set_to(".odd", torch.ones(1)), "k_proj.odd' .* is not part of"),
    ],
)
def test_damaged_tensors_are_named(
    kind: str, edit: Callable[[dict[str, Tensor]], Any], message: str, dense: Path, tmp_path: Path
) -> None:
    folder = quantised_folder(dense, tmp_path / "m", kind)
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32, CPU)


def test_weights_that_the_dtype_cannot_hold_are_named(dense: Path, tmp_path: Path) -> None:
    folder = quantised_folder(dense, tmp_path / "m", "fp8 blocks")
    change(folder, set_to(".weight_scale_inv", torch.full((2, 2), 1e6)))
    load_model(folder, torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"_scale_inv' makes weights .* for torch.float16"):
        load_model(folder, torch.float16, CPU)


@pytest.mark.parametrize(
    ("listed", "count"),
    [("k_proj", 1), ("model.layers.0.mlp", 3), ("model.layers.0.mlp*", 3), ("*.up_proj", 1),
     ("model.layers.1", 0), ("up", 0), ("", 0), ("*", 0), ("re:(a|a)*$", 0)],
)  # fmt: skip
def test_layers_that_a_list_leaves_out_are_told(
    listed: str, count: int, dense: Path, tmp_path: Path
) -> None:
    form = FORMATS["fp8 blocks"]
    config = form.config | {"modules_to_not_convert": ["lm_head", listed]}
    found = open_model(quantised_folder(dense, tmp_path / "m", form._replace(config=config)))
    assert found.quantised is not None
    told = [text for text in found.quantised.not_served if "layers listed as not quantised" in text]
    assert len(told) == bool(count)
    assert all(f"({count}, such as 'model.layers.0." in text for text in told)


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
ORDERED = {"num_bits": 4, "type": "int", "group_size": 32, "actorder": "group"}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("fp8 blocks", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not read .only fp8, "),
        ("fp8 blocks", {"quant_method": None}, "quant_method = None is not read"),
        ("fp8 blocks", {"quant_method": ["fp8"]}, "is not read .only"),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt = 'e5m2' is not read .only 'e4m3'"),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, "blocks of 64 x 64"),
        ("fp8 blocks", {"weight_block_size": [0, 128]}, "must be two positive integers"),
        ("fp8 blocks", {"weight_block_size": None}, "scales: one or one an output"),
        (
            "fp8 blocks",
            {"modules_to_not_convert": [1]},
            "modules_to_not_convert = .* list of names",
        ),
        ("awq", {"bits": 8}, "bits = 8 is not read .only 4"),
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("awq", {"group_size": 2.5}, "group_size = 2.5"),
        ("awq", {"group_size": 64}, "groups of 64"),
        ("gptq", {"desc_act": True}, "desc_act = True .act-order. is not read"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic.*bits = 8"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format = True"),
        ("gptq", {"dynamic": 7}, "dynamic = 7"),
        ("compressed int4", {"format": "marlin-24"}, "format = 'marlin-24'"),
        (
            "compressed int4",
            {"config_groups": {"g": {"weights": INT8}}},
            "num_bits = 8 of type 'int'",
        ),
        ("compressed int4", {"config_groups": {"g": {"weights": ORDERED}}}, "actorder = 'group'"),
        ("compressed int4", {"config_groups": {}}, "config_groups = .* describes no weights"),
        ("compressed int4", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ' is not read"),
        ("modelopt fp8", {"quantized_layers": {"a": {"quant_algo": "INT8_SQ"}}}, "'INT8_SQ'"),
        ("modelopt fp8", {"pre_quant_scale": True}, "pre_quant_scale"),
    ],
)
def test_recipes_that_are_not_read(
    kind: str, changes: dict[str, Any], message: str, dense: Path, tmp_path: Path
) -> None:
    form = FORMATS[kind]
    folder = quantised_folder(dense, tmp_path / "m", form._replace(config=form.config | changes))
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(folder, torch.float32, CPU)
    assert str(folder) in str(error.value)
    assert len(str(error.value)) < 1000


ODD = (None, [], {}, "x", [[]], [{"a": 1}], {"a": []}, {"a": {"b": []}}, -1, 0, True, 10**40, "4")


@pytest.mark.parametrize("kind", ["fp8 blocks", "compressed int4", "modelopt fp8", "awq", "gptq"])
def test_odd_values_of_a_recipe_end_in_an_error_of_ours(
    kind: str, dense: Path, tmp_path: Path
) -> None:
    form = FORMATS[kind]
    folder = quantised_folder(dense, tmp_path / "m", kind)
    plain = json.loads((folder / "config.json").read_text())
    for value in ODD:
        configs = [value, *({**form.config, key: value} for key in form.config)]
        for config in configs:
            said = json.dumps({**plain, "quantization_config": config})
            (folder / "config.json").write_text(said)
            try:
                open_model(folder).architecture  # noqa: B018
                _ = open_model(folder).quantised
            except CheckpointError as error:
                assert str(folder) in str(error)  # noqa: PT017
    (folder / "config.json").write_text(json.dumps(plain | {"quantization_config": None}))
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="hf_quant_config"):
        open_model(folder)


def test_zero_biases_of_gptq_are_left_out(dense: Path, tmp_path: Path, caplog) -> None:
    """Tools of GPTQ write some for every layer; others are part of no model."""
    more = {f"{K}.bias": torch.zeros(192)}
    folder = quantised_folder(dense, tmp_path / "m", "gptq", more=more)
    with caplog.at_level(logging.WARNING, "megatron_async"):
        assert_same_weights(weights_of(folder), weights_of(tmp_path / "m-plain"))
    assert "biases of zeros (1 tensors)" in caplog.text
    change(folder, set_to(".bias", 1.0))
    with pytest.raises(CheckpointError, match=r"k_proj.bias' .* is not part of"):
        load_model(folder, torch.float32, CPU)


def test_fp8_without_a_recipe_is_refused(dense: Path, tmp_path: Path) -> None:
    folder = quantised_folder(dense, tmp_path / "m", FORMATS["fp8 blocks"]._replace(config={}))
    with pytest.raises(CheckpointError, match=r"is stored as F8_E4M3, .* quantization_config"):
        load_model(folder, torch.float32, CPU)


def test_what_is_not_served_is_told(dense: Path, tmp_path: Path, caplog) -> None:
    """At load, and by `info`, with the format, bits a weight and bytes."""
    scales = {f"{K}.k_scale": torch.ones(1), f"{K[:-6]}v_proj.v_scale": torch.ones(1)}
    folder = quantised_folder(dense, tmp_path / "m", "modelopt fp8", more=scales)
    with caplog.at_level(logging.INFO, "megatron_async"):
        load_model(folder, torch.float32, CPU)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "quantised by modelopt: FP8, scales: one: 7 weights" in said
    assert "of layers (static, 7 scales in the files): rounded where FP8 is" in said
    assert "keys and values" not in said, "fp8 is served"
    info = model_info(folder, memory_gb=1, dtype="bfloat16")
    assert info.quantised is not None
    stored = load_file(folder / MODEL)
    told = ("k_scale", "v_scale", "input_scale")
    assert info.quantised.stored_bytes == sum(
        t.nbytes for n, t in stored.items() if not n.endswith(told)
    )
    assert 8 < info.quantised.bits < 8.01
    text = format_info(info)
    assert re.search(r"in fp8 +8 bits, float, 2 scales in the files", text)
    assert re.search(r"quantised +modelopt: FP8, scales: one: 7 weights, 8 bits a weight", text)
    assert "in the files" in text
    assert "by these scales" in text
    # A recipe that no weight follows.
    odd = quantised_folder(dense, tmp_path / "odd", Format(BLOCKS, lambda w: ({".weight": w}, w)))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "megatron_async"):
        load_model(odd, torch.float32, CPU)
    assert "no weight is quantised" in caplog.text


@pytest.mark.parametrize("to", ["torch_dist", "huggingface"])
def test_a_converted_folder_has_16_bits(to: str, dense: Path, tmp_path: Path) -> None:
    folder = quantised_folder(dense, tmp_path / "m", "fp8 blocks")
    convert(folder, tmp_path / "out", to=to, dtype="bfloat16")
    plain = weights_of(tmp_path / "m-plain")
    rounded = {name: weight.bfloat16().float() for name, weight in plain.items()}
    assert_same_weights(weights_of(tmp_path / "out"), rounded)
    assert open_model(tmp_path / "out").quantised is None
