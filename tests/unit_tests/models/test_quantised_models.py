"""Models whose weights stay quantised, whole: their tokens, what rounds 16-bit checkpoints at load,
and what is refused. Devices here are CPUs; what keeps weights on a GPU is asked of them too."""

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megatron_async.checkpoints.quantised_model as quantised_model
from megatron_async import LLM, InferenceConfig, SamplingParams
from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.draft_layer import save_draft_layer
from megatron_async.checkpoints.info import format_info, model_info, model_program
from megatron_async.checkpoints.kernel_program import program_of
from megatron_async.checkpoints.mapping import Shard, mtp_weights
from megatron_async.checkpoints.quantised_model import Kept
from megatron_async.checkpoints.source import named_tensors
from megatron_async.cli.serving import _model_name
from megatron_async.errors import ConfigurationError, UpdateError
from megatron_async.lab.absent_gpu import few_layers
from megatron_async.models.held_weight import is_linear, quantised_weights
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.partition import part_of_rank
from megatron_async.ops.linear.quantised_layout import Layout, quantise
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight, widened
from megatron_async.updates.checksum import weights_checksum
from tests.support.quantised_folders import E4M3, FORMATS, MODEL, quantised_folder
from tests.unit_tests.checkpoints.mtp_folders import write_folder

CPU = torch.device("cpu")
DENSE = "dummy:qwen3:layers=2,hidden=256,heads=2,groups=2,head=128,ffn=512,vocab=256"
WIDE = "dummy:qwen3:layers=8,hidden=256,heads=2,groups=2,head=128,ffn=768,vocab=32"
TINY = "dummy:qwen3:layers=1,hidden=64,heads=2,groups=2,head=32,ffn=96,vocab=64"
GREEDY = SamplingParams(
    num_tokens_to_generate=8, temperature=0.0, termination_id=-1, return_log_probs=True
)


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps what a GPU does."""
    monkeypatch.setattr(quantised_model, "keeps_on", lambda device: True)


def built(kept: Kept, name: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with the weights of `kept`."""
    source = open_model(name)
    model = build_model(source.architecture, dtype, CPU, layouts=kept.of_model)
    source.load_weights(model)
    return model


def generated(model: Any, **settings: Any) -> tuple[Any, Any]:
    """Tokens and log probs, and the names of weights that are quantised."""
    with LLM(str(model), device="cpu", max_tokens=32, max_requests=2, **settings) as llm:
        requests = llm.generate([[5, 9, 17], list(range(30, 50))], GREEDY)
        served = llm.engine.controller.inference_wrapped_model.model
        names = {name for name, _ in quantised_weights(served)}
    return [(r.generated_tokens, r.generated_log_probs) for r in requests], names


def assert_same(found: Any, expected: Any) -> None:
    for (tokens, log_probs), (theirs, expected_log_probs) in zip(found, expected, strict=True):
        assert tokens == theirs
        torch.testing.assert_close(
            torch.tensor(log_probs), torch.tensor(expected_log_probs), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq zeros"])
def test_a_dense_model_says_what_the_decoded_one_says(kind: str, keeps, tmp_path: Path) -> None:
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", kind)
    found, names = generated(folder, quantization="file")
    assert len(names) == 8
    for quantization in (None, "none"):
        decoded, none = generated(folder, quantization=quantization)
        assert not none
        assert_same(found, decoded)


@pytest.mark.parametrize(
    ("name", "kind"), [("nemotron-3", "modelopt fp8"), ("qwen3.5-moe", "compressed channel")]
)
def test_experts_hybrids_and_drafts(name: str, kind: str, keeps, tmp_path: Path) -> None:
    """With layers of multi-token prediction, whose weights are kept too."""
    write_folder(name, tmp_path / "plain")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", kind)
    drafts = {"speculative_method": "mtp", "num_speculative_tokens": 1}
    found, names = generated(folder, quantization="file", **drafts)
    assert any(name.startswith("mtp.") for name in names)
    assert any(".experts." in name for name in names)
    decoded, none = generated(folder, quantization="none")
    assert not none
    assert_same(found, decoded)


@pytest.mark.parametrize("form", ["huggingface", "torch_dist"])
def test_16_bit_checkpoints_are_rounded_at_load(form: Any, keeps, tmp_path: Path) -> None:
    """Weights are rounded to FP8, each block of 128 x 128 by its largest number; memory is what
    `Kept.num_bytes` says, and at most 0.55 of 16 bits."""
    folder = tmp_path / form
    convert(WIDE, folder, to=form, dtype="bfloat16")
    kept = Kept.on("cpu", {"quantization": "fp8"}, open_model(folder))
    plain = {n: w for n, w in named_tensors(load_model(folder, torch.bfloat16, CPU).model).items()}
    model = built(kept, folder)
    held = named_tensors(model)
    for name, weight in held.items():
        given = plain[name]
        assert isinstance(given, Tensor)
        assert isinstance(weight, QuantisedWeight) == is_linear(name), name
        exact, near = given.float(), torch.zeros(())
        if isinstance(weight, QuantisedWeight):
            assert weight.form.words == "FP8, scales: blocks of 128 x 128"
            blocks = exact.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            step = blocks.abs().amax((1, 3), keepdim=True) / 448
            near = 2**-4 * exact.abs() + (step / 1024).expand(blocks.shape).reshape(exact.shape)
        assert ((widened(weight).float() - exact).abs() <= near).all(), name
    total = sum(weight.nbytes for weight in held.values())
    assert total == kept.num_bytes(torch.bfloat16)
    assert total <= 0.55 * sum(weight.nbytes for weight in plain.values())


def test_random_weights_are_those_of_16_bits_rounded(keeps) -> None:
    settings = {"quantization": "fp8"}
    kept = Kept.on("cpu", settings, open_model(TINY))
    held = named_tensors(built(kept, TINY))
    plain = named_tensors(load_model(TINY, torch.bfloat16, CPU).model)
    for name, weight in held.items():
        like = plain[name]
        assert isinstance(like, Tensor)
        if isinstance(weight, QuantisedWeight):
            expected = kept.layouts(Shard())[name].empty(tuple(like.shape), like.dtype, CPU)
            quantise(like, expected)
            assert torch.equal(weight.values(), expected.values())
        else:
            assert torch.equal(weight, like)
    with LLM(TINY, device="cpu", dtype="bfloat16", quantization="fp8") as llm:
        assert _model_name(Namespace(model="m"), llm) == "m in bfloat16, weights of 8 bits"
    tokens, names = generated(TINY, quantization="fp8")
    assert names == {n for n in held if is_linear(n)}
    assert len(tokens) == 2


@pytest.mark.parametrize(("rows", "inputs"), [(1, 0), (1, 128), (128, 128)])
def test_blocks_are_rounded_by_their_largest_number(rows: int, inputs: int) -> None:
    weight = torch.randn(3, 300, 200, generator=torch.Generator().manual_seed(0))
    weight[1, 5, 150] = 1000
    weight[2] = 0
    into = Layout(Form("FP8", rows, inputs)).empty(tuple(weight.shape), torch.float32, CPU)
    quantise(weight, into)
    each = into.scales.repeat_interleave(rows, 1)[:, :300]
    each = each.repeat_interleave(inputs or 200, 2)[..., :200]
    assert into.values()[1, 5, 150] == pytest.approx(1000, rel=1e-6)
    assert ((into.values() - weight).abs() <= 2**-4 * weight.abs() + each / 1024).all()
    assert (into.values()[2] == 0).all()


def test_settings_that_are_not_possible_are_refused(keeps, monkeypatch, tmp_path: Path) -> None:
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", "awq")
    with pytest.raises(ConfigurationError, match=r"'fp8' is for weights of 16 bits, .* holds INT4"):
        LLM(str(folder), device="cpu", quantization="fp8")
    with pytest.raises(ConfigurationError, match=r"'file' keeps .*; dummy:.* holds none"):
        LLM(TINY, device="cpu", quantization="file")
    with pytest.raises(ConfigurationError, match="'fp8' is not served with transformer_impl"):
        LLM(TINY, device="cpu", quantization="fp8", transformer_impl="transformer_engine")
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="'fp8' is for GPUs"):
        LLM(TINY, device="cpu", quantization="fp8")
    with pytest.raises(ConfigurationError, match="of a quantised folder on a GPU"):
        LLM(str(folder), device="cpu", quantization="file")
    found, names = generated(folder)
    assert not names
    assert len(found) == 2


def test_kernels_are_compiled_for_the_same_layouts(tmp_path: Path) -> None:
    """By the names of one rank of two, for products of FP8 by FP8 where a GPU has them; and
    `info` tells of them."""
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    source = open_model(quantised_folder(tmp_path / "plain", tmp_path / "m", "fp8 blocks"))
    kept_as = {"quantization": "file"}
    for settings, dtype, default in (
        ({}, torch.bfloat16, "file"), ({}, torch.float32, None),
        ({"batch_invariant_mode": True}, torch.bfloat16, None), ({"quantization": "none"},
        torch.bfloat16, None),
    ):  # fmt: skip
        found = Kept.on("cuda", settings, source, capability=(9, 0), dtype=dtype)
        assert found.quantization == default, (settings, dtype)
    info = model_info(source, device="cuda", dtype="bfloat16", memory_gb=1, **kept_as)
    assert info.weight_bytes == Kept.on("cuda", kept_as, source, capability=(8, 0)).num_bytes(
        torch.bfloat16
    )
    assert info.weight_bytes < 0.6 * 2 * info.parameters
    assert "weights, bfloat16 or as in the files" in format_info(info)
    assert "as in the files" not in format_info(model_info(tmp_path / "plain", memory_gb=1))
    program = "\n".join(model_program(source, 2, 2, major=9, **kept_as))
    assert program.count("qkv (streamed, FP8)") == 2
    for capability, rounds in (((9, 0), True), ((8, 0), False)):
        kept = Kept.on("cuda", kept_as, source, capability=capability)
        config = InferenceConfig(device="cpu")
        part = part_of_rank(source.architecture, ParallelSizes(2))
        shard = Shard(1, 2)
        program = program_of(part, torch.bfloat16, config, kept, Shard(tensor_size=2))
        found = {
            n: Layout.of_json(each)
            for n, each in json.loads(json.dumps(program["layouts"])).items()
        }
        assert found == kept.layouts(shard)
        assert {layout.form.rounds_rows for layout in found.values()} == {rounds}


def test_rows_are_rounded_where_they_are_computed() -> None:
    shape = "dummy:llama:layers=1,hidden=4096,heads=32,groups=8,head=128,ffn=14336,vocab=64"
    for rows, kernel in ((64, "streamed"), (256, "cuBLASLt")):
        program = model_program(open_model(shape), rows, rows, major=9, quantization="fp8")
        assert "attention + rounding, proj (streamed" in program[1]
        assert f"norm + fc1 + SwiGLU + rounding ({kernel}, FP8), fc2 (streamed" in program[2]


@pytest.mark.parametrize(("staging", "model"), [("device", TINY), ("host", DENSE)])
def test_new_weights_are_rounded_where_the_old_ones_are(
    staging: str, model: str, keeps, tmp_path
) -> None:
    """Rounding is a fresh load's, by outputs or blocks; memory is the same, so that captured steps
    stay valid."""
    convert(model, tmp_path / "m", to="huggingface", dtype="bfloat16")
    new = {n: 1.5 * t.flip(0) for n, t in load_file(tmp_path / "m" / MODEL).items()}
    shutil.copytree(tmp_path / "m", tmp_path / "new")
    save_file(new, tmp_path / "new" / MODEL, metadata={"format": "pt"})
    settings = {"device": "cpu", "dtype": "bfloat16", "quantization": "fp8"}
    with LLM(str(tmp_path / "new"), **settings) as llm:
        fresh = llm.engine.controller.inference_wrapped_model.model
        expected, whole = named_tensors(fresh), weights_checksum(fresh)
    with LLM(str(tmp_path / "m"), **settings) as llm:
        served = llm.engine.controller.inference_wrapped_model.model
        held = dict(quantised_weights(served))
        first = {n: [t.data_ptr() for _, t in weight.tensors()] for n, weight in held.items()}
        assert weights_checksum(served) != whole
        llm.update_weights(new.items(), 1, staging=staging)
        llm.engine.context.device.caller_waits()
        assert weights_checksum(served) == whole
        found = named_tensors(served)
        for name, addresses in first.items():
            weight = found[name]
            assert isinstance(weight, QuantisedWeight)
            assert [t.data_ptr() for _, t in weight.tensors()] == addresses
        for name, weight in found.items():
            assert torch.equal(widened(weight), widened(expected[name])), name
        name, weight = next(iter(held.items()))
        weight.scales[0] *= 2
        changed = weights_checksum(served)
        assert {n for n in whole if whole[n] != changed[n]} == {f"{name} scales"}


def test_updates_that_cannot_be_rounded_are_refused(keeps, tmp_path: Path) -> None:
    with LLM(TINY, device="cpu", quantization="fp8") as llm:
        for staging in ("direct", "none"):
            with pytest.raises(UpdateError, match=r"is kept as FP8, .*: use staging='device'"):
                llm.update_weights([], 1, staging=staging)
        with pytest.raises(UpdateError, match="nobody can write"), llm.weights_open(1):
            pass
        assert llm.generate([[1, 2]], GREEDY)[0].generated_tokens
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", "awq")
    message = r"kept as INT4, .* not rounded: .*'none'"
    file = {"device": "cpu", "quantization": "file"}
    with LLM(str(folder), **file) as llm, pytest.raises(UpdateError, match=message):
        llm.update_weights([], 1)


def test_a_draft_layer_of_its_own_leaves_the_folder_quantised(keeps: None, tmp_path: Path) -> None:
    """Break it: let `WithDraftLayer` not hand on what its folder holds, or how it is read."""
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", "fp8 blocks")
    file = tmp_path / "draft.safetensors"
    save_draft_layer({}, "*-", {}, file)
    wanted = list(mtp_weights(open_model(str(folder), file).architecture))
    parts = {name: shape for weight in wanted for name, shape in weight.parts.items()}
    save_draft_layer({name: torch.rand(shape) for name, shape in parts.items()}, "*-", {}, file)
    source = open_model(str(folder), file)
    with pytest.raises(ConfigurationError, match="holds FP8"):
        Kept.on("cpu", {"quantization": "fp8"}, source)
    kept = Kept.on("cpu", {"quantization": "file"}, source)
    assert kept.quantization == "file"
    model = build_model(
        source.architecture, torch.bfloat16, CPU, with_mtp=True, layouts=kept.of_model
    )
    source.load_weights(model)
    alone = dict(
        quantised_weights(
            built(Kept.on("cpu", {"quantization": "file"}, open_model(folder)), folder)
        )
    )
    found = dict(quantised_weights(model))
    assert found.keys() == alone.keys()
    for name, weight in found.items():
        assert torch.equal(widened(weight), widened(alone[name])), name


STATIC = {
    "fp8 tensor": ".activation_scale",
    "compressed tensor": ".input_scale",
    "modelopt fp8": ".input_scale",
}
"""Formats with a scale of inputs in the files, and the end of its name."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def static_folder(kind: str, plain: Path, target: Path) -> dict[str, float]:
    """A folder whose layers each have another scale of inputs, by the layer's name. Inputs behind
    a norm, which are some 1 large, are cut by them."""
    form = FORMATS[kind]

    def encode(w: Tensor) -> Any:
        tensors, values = form.encode(w)
        tensors[STATIC[kind]] = tensors[STATIC[kind]] * (0.002 + w.abs().mean() / 10)
        return tensors, values

    quantised_folder(plain, target, form._replace(encode=encode))
    stored = load_file(target / MODEL)
    return {
        n.removesuffix(end): float(t) for n, t in stored.items() if n.endswith(end := STATIC[kind])
    }


def reference(folder: Path, scales: dict[str, float], tokens: list[int]) -> Tensor:
    """Log probs that transformers gives, in float32, where a layer's inputs are rounded by its
    scale, of layers that share their inputs by the largest one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, scale in scales.items():
        parent, _, own = name.rpartition(".")
        group = next((names for names in FUSED if own in names), (own,))
        scale = max(scales[f"{parent}.{each}"] for each in group)

        def rounded(_: Any, given: Any, scale: float = scale) -> Tensor:
            return (given[0] / scale).clamp(-448, 448).to(E4M3).float() * scale

        model.get_submodule(name).register_forward_pre_hook(rounded)
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.fixture
def rounds(keeps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a CPU round rows, as a GPU's of FP8 do."""
    on = Kept.on

    def rounding_kept(*given: Any, **named: Any) -> Kept:
        return on(*given, **named)._replace(rounds_rows=True)

    monkeypatch.setattr(Kept, "on", rounding_kept)


@pytest.mark.parametrize("kind", STATIC)
def test_inputs_are_rounded_by_the_scales_of_the_files(kind: str, rounds, tmp_path: Path) -> None:
    """Break it: take the smallest of layers that share their inputs, or scales of rows."""
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="float32")
    scales = static_folder(kind, tmp_path / "plain", tmp_path / "m")
    tokens = list(range(5, 60, 3))
    settings = {"quantization": "file", "kv_cache_dtype": "model"}
    with LLM(str(tmp_path / "m"), device="cpu", **settings) as llm:
        found = torch.tensor(llm.score([tokens])[0].prompt_log_probs)
        model = llm.engine.controller.inference_wrapped_model.model
        whole, (name, weight) = weights_checksum(model), next(iter(quantised_weights(model)))
        assert weight.input_scale is not None
        weight.input_scale.mul_(2)
        changed = weights_checksum(model)
        assert {n for n in whole if whole[n] != changed[n]} == {f"{name} input_scale"}
    expected = reference(tmp_path / "m-plain", scales, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    other = reference(tmp_path / "m-plain", {}, tokens)
    assert (expected - other).abs().max() > 0.01


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.zeros(()), "no number from 6e-08"),
        (torch.tensor([-1.0]), "no number from"),
        (torch.tensor(float("nan")), "no number from"),
        (torch.tensor(float("inf")), "no number from"),
        (torch.ones(256), "the shape .256.: one scale is read"),
        (torch.ones((), dtype=torch.int64), "stored as I64: scales are"),
        (None, "k_proj.weight' has no scale of its inputs, for which .*q_proj"),
    ],
)
def test_bad_scales_of_inputs_are_refused_by_name(
    scale: Tensor | None, message: str, rounds, tmp_path: Path
) -> None:
    """Where rows are rounded by them; without the setting the folder is served."""
    convert(TINY, tmp_path / "plain", to="huggingface", dtype="float32")
    folder, name = tmp_path / "m", "model.layers.0.self_attn.k_proj.input_scale"
    static_folder("modelopt fp8", tmp_path / "plain", folder)
    stored = load_file(folder / MODEL)
    stored = {n: t for n, t in stored.items() if n != name} | (
        {} if scale is None else {name: scale}
    )
    save_file(stored, folder / MODEL, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{message}.*quantization='none'") as error:
        LLM(str(folder), device="cpu", quantization="file")
    assert "k_proj" in str(error.value)
    assert len(generated(folder, quantization="none")[0]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8 blocks", "modelopt fp8"])
def test_a_gpu_keeps_a_folder_and_says_what_the_decoded_one_says(kind: str, tmp_path: Path) -> None:
    """To the rounding of rows to FP8, also by a static scale; new weights are rounded while
    captured steps stay."""
    convert(DENSE, tmp_path / "plain", to="huggingface", dtype="bfloat16")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", kind)
    said = {}
    for quantization in (None, "none"):
        with LLM(str(folder), device="cuda", quantization=quantization) as llm:
            model = llm.engine.controller.inference_wrapped_model.model
            weights = (weight for _, weight in quantised_weights(model))
            kept = {(w.form.rounds_rows, w.input_scale is not None) for w in weights}
            assert kept == (set() if quantization else {(True, kind != "fp8 blocks")})
            said[quantization] = llm.score([list(range(40))])[0].prompt_log_probs
    found, expected = (torch.tensor(said[word][1:]) for word in (None, "none"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    new = {n: t.flip(0) for n, t in load_file(tmp_path / "plain" / MODEL).items()}
    with LLM(str(tmp_path / "plain"), device="cuda", quantization="fp8") as llm:
        before = llm.generate([[5, 9, 17]], GREEDY)[0].generated_log_probs
        llm.update_weights(new.items(), 1)
        after = llm.generate([[5, 9, 17]], GREEDY)[0].generated_log_probs
        assert before != after
        llm.engine.context.device.caller_waits()
        torch.cuda.synchronize()
        held = named_tensors(llm.engine.controller.inference_wrapped_model.model)
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        expected_weight = new["model.layers.0.self_attn.o_proj.weight"].float()
        found_weight = widened(held[name]).float().cpu()
        assert (found_weight - expected_weight).abs().max() <= expected_weight.abs().max() / 16


def test_the_layers_that_kernels_are_found_by_differ_by_their_layouts() -> None:
    """A last layer of another form is among them."""
    architecture = open_model(WIDE).architecture
    assert few_layers(architecture).num_layers == 2
    kept = Kept.on("cuda", {"quantization": "fp8"}, open_model(WIDE), capability=(9, 0))
    layouts = dict(kept.layouts(Shard()))
    assert few_layers(architecture, layouts).num_layers == 2
    del layouts["decoder.layers.15.mlp.linear_fc2.weight"]
    assert few_layers(architecture, layouts).num_layers == 8
