"""gpt-oss: tokens and log probs are those of transformers, of both forms of its files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.quantised_model import Kept
from megatron_async.checkpoints.torch_dist import save_torch_dist
from megatron_async.checkpoints.weight import Shard
from megatron_async.devices import CudaDevice
from megatron_async.models.hybrid import build_model
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.ops.linear.stored_formats import E2M1
from tests.support.harness import CPU, greedy, make_engine, random_prompts

TOKENS = 8
LENGTHS = (1, 5, 9, 16, 33)
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    # Waves of all three kinds, among 8 pairs.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
RECIPE = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def in_mxfp4(folder: Path, model: Any) -> None:
    """Write experts as published files hold them, and give `model` what their numbers mean."""
    names, tensors = model.state_dict(), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(121, 125, codes.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        numbers = torch.tensor(E2M1)[torch.stack((codes & 15, codes >> 4), -1).int()]
        scaled = numbers.flatten(-2) * torch.exp2(exponents[..., None].float() - 127)
        names[name].copy_(scaled.flatten(2).transpose(1, 2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": RECIPE}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Form of the files -> a folder, and transformers' model in float32."""
    import transformers

    def make(form: str) -> tuple[Path, Any]:
        torch.manual_seed(1)
        config = transformers.GptOssConfig(**SIZES, attn_implementation="eager")
        model = transformers.GptOssForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                # Beyond the bounds of the gated unit, for some.
                torch.nn.init.normal_(parameter.data, std=4.0 if "gate_up" in name else 1.0)
        folder = tmp_path_factory.mktemp("gpt_oss")
        model.save_pretrained(folder)
        if form == "mxfp4":
            in_mxfp4(folder, model)
        return folder, model

    return make


@torch.no_grad()
def theirs(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, and log probs of all tokens but the first."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    log_probs = found.gather(1, torch.tensor(tokens[1:])[:, None])
    return tokens[len(prompt) :], log_probs[:, 0].tolist()


@pytest.mark.parametrize("form", ["float", "mxfp4"])
def test_tokens_and_log_probs_are_those_of_transformers(
    form: str, saved: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = saved(form)
    loaded = load_model(folder, torch.float32, CPU)
    prompts = random_prompts(5, LENGTHS, 96)
    expected = [theirs(model, prompt) for prompt in prompts]
    params = greedy(TOKENS, return_log_probs=True, skip_prompt_log_probs=False)
    for lookahead, budget, block in ((0, 64, 4), (2, 5, 16)):
        engine = make_engine(
            loaded.model,
            lookahead=lookahead,
            max_tokens=budget,
            block_size_tokens=block,
            max_requests=4,
            max_sequence_length=64,
        )
        found = engine.generate(prompts, [params] * len(prompts))
        for request, (tokens, log_probs) in zip(found, expected, strict=True):
            assert request.generated_tokens == tokens, (lookahead, request.error)
            ours = [*request.prompt_log_probs, *request.generated_log_probs]
            assert ours == pytest.approx(log_probs, abs=2e-4)


def test_a_written_folder_is_the_same(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = saved("float")
    source = open_model(folder)
    loaded = load_model(folder, torch.float32, CPU)
    save_huggingface(loaded.model, source.architecture, None, tmp_path / "written")
    theirs, ours = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "written")
    )
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert open_model(tmp_path / "written").architecture == source.architecture
    total = sum(parameter.numel() for parameter in model.parameters())
    assert source.architecture.num_parameters == total
    save_torch_dist(loaded.model, source.architecture, None, tmp_path / "torch_dist")
    again = load_model(tmp_path / "torch_dist", torch.float32, CPU)
    assert again.architecture == source.architecture
    for (name, ours_), theirs_ in zip(
        loaded.model.named_parameters(), again.model.parameters(), strict=True
    ):
        assert torch.equal(ours_, theirs_), name


@pytest.mark.parametrize("form", ["float", "mxfp4"])
def test_each_rank_reads_its_share(form: str, saved: Callable[[str], tuple[Path, Any]]) -> None:
    """Two ranks share each expert's width, whose rows of gate and up stand in turns."""
    source = open_model(saved(form)[0])
    whole = load_model(saved(form)[0], torch.float32, CPU).model.decoder.layers[1].mlp.experts
    prefix, names = "decoder.layers.1.mlp.experts.", ("linear_fc1.weight", "linear_fc1.bias")
    for rank in range(2):
        wanted = source.held_weights(Shard(tensor_rank=rank, tensor_size=2))
        for weight in wanted:
            if weight.name.removeprefix(prefix) in names:
                place = torch.full(weight.shape, torch.nan)
                for name, region, view in weight.pieces(place):
                    source.fill(view, name, region)
                full = whole.get_parameter(weight.name.removeprefix(prefix))
                halves = [half.chunk(2, 1)[rank] for half in full.chunk(2, 1)]
                assert torch.equal(place, torch.cat(halves, 1))


def kept_model(folder: Path, device: torch.device) -> torch.nn.Module:
    """A model in bfloat16 whose experts are as in the files."""
    source = open_model(folder)
    kept = Kept.on("cuda", {}, source, capability=(9, 0))
    model = build_model(source.architecture, torch.bfloat16, device, layouts=kept.of_model)
    source.load_weights(model)
    return model


def test_experts_that_are_kept_as_in_the_files(saved: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = saved("mxfp4")
    kept = kept_model(folder, CPU)
    decoded = load_model(folder, torch.bfloat16, CPU).model
    for kept_layer, layer in zip(kept.decoder.layers[1::2], decoded.decoder.layers[1::2]):
        for name in ("linear_fc1", "linear_fc2"):
            operand = kept_layer.mlp.experts.get_submodule(name).operand
            assert isinstance(operand, QuantisedWeight)
            assert torch.equal(operand.values(), layer.mlp.experts.get_submodule(name).weight)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "dtype"), [("float", torch.float32), ("mxfp4", torch.bfloat16)])
def test_on_a_gpu(form: str, dtype: torch.dtype, saved: Callable[[str], tuple[Path, Any]]) -> None:
    """Tokens of float32, and near log probs by experts in their 4 bits."""
    folder, model = saved(form)
    cuda = torch.device("cuda")
    is_whole = dtype == torch.float32
    ours = load_model(folder, dtype, cuda).model if is_whole else kept_model(folder, cuda)
    prompts = random_prompts(5, LENGTHS, 96)
    params = greedy(TOKENS, return_log_probs=True, skip_prompt_log_probs=False)
    engine = make_engine(
        ours, device=CudaDevice(), lookahead=1, max_requests=8, max_sequence_length=128
    )
    for request, prompt in zip(engine.generate(prompts, params), prompts, strict=True):
        assert request.error is None
        tokens = [*prompt, *request.generated_tokens]
        with torch.no_grad():
            found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected = found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        log_probs = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
        error = (log_probs - expected).abs()
        print(form, len(prompt), "largest error", error.max().item(), "mean", error.mean().item())
        assert error.mean() < (1e-3 if is_whole else 0.25)
