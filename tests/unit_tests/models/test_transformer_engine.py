"""`transformer_impl`: clear errors where TransformerEngine cannot run, our logits where it can."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear, RMSNorm

from megatron_async import (
    LLM,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.mapping import mtp_weights, weights
from megatron_async.checkpoints.source import model_parameters, named_tensors
from megatron_async.cli import main as cli
from megatron_async.errors import ConfigurationError
from megatron_async.lab.references import LogitsKeeper
from megatron_async.models import transformer_engine_spec
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.transformer_engine_spec import HAVE_TE, require_transformer_engine
from tests.support import te_stand_ins
from tests.support.te_stand_ins import LayerNormColumn, Norm

CPU = torch.device("cpu")
TINY = DUMMY_SHAPES["tiny"]


def test_a_cpu_is_told_to_use_local():
    with pytest.raises(ConfigurationError, match=r"needs a GPU, but the device is cpu.*'local'"):
        LLM("dummy:tiny", device="cpu", transformer_impl="transformer_engine")


@pytest.mark.skipif(HAVE_TE, reason="TransformerEngine is installed")
def test_without_the_package_the_error_says_what_to_install():
    with pytest.raises(ConfigurationError, match=r"pip install .*transformer-engine\[pytorch\]"):
        require_transformer_engine(torch.device("cuda"))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigurationError, match=r"'flux' is unknown: .*'local', 'transformer_eng"):
        build_model(TINY, torch.float32, CPU, transformer_impl="flux")


def test_the_command_line_option(capsys: pytest.CaptureFixture[str]):
    tiny = ["generate", "--model", "dummy:tiny", "--device", "cpu", "--no-progress"]
    option = ["--prompt", "1 2", "--transformer-impl", "transformer_engine"]
    assert cli.main([*tiny, *option]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert cli.main([*tiny, "--prompt", "1 2", "--transformer-impl", "local"]) == 0


def module_of(parameters: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module with parameters of these dotted names."""
    root = torch.nn.Module()
    for name, value in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))
    return root


@pytest.mark.parametrize("to", ["huggingface", "torch_dist"])
def test_checkpoints_load_into_norms_that_live_in_linear_layers(to: str, tmp_path: Path):
    """The parameter names of the TransformerEngine spec, which is laid out on a GPU only."""
    convert("dummy:tiny", tmp_path / to, to=to)
    expected = dict(load_model(tmp_path / to, torch.float32, CPU).model.named_parameters())
    table = list(weights(TINY))
    renamed = {weight.stored: torch.full(weight.shape, torch.nan) for weight in table}
    assert sum("layer_norm_weight" in name for name in renamed) == 2 * TINY.num_layers
    model = module_of(renamed)
    open_model(tmp_path / to).load_weights(model)
    found = dict(model.named_parameters())
    for weight in table:
        assert torch.equal(found[weight.stored], expected[weight.name]), weight.stored


def column(inputs: int, outputs: int, *, config: Any, bias: bool, **_: Any) -> LayerNormColumn:
    """A stand-in of `TELayerNormColumnParallelLinear`."""
    norm, linear = RMSNorm(inputs, config.layernorm_epsilon), Linear(inputs, outputs, bias)
    return LayerNormColumn(norm, linear, config.layernorm_zero_centered_gamma)


def row(inputs: int, outputs: int, *, bias: bool, **_: Any) -> te_stand_ins.Linear:
    """A stand-in of `TERowParallelLinear`."""
    return te_stand_ins.Linear(Linear(inputs, outputs, bias))


def norm(hidden_size: int, eps: float, config: Any, **_: Any) -> Norm:
    """A stand-in of `TENorm`."""
    return Norm(RMSNorm(hidden_size, eps), config.layernorm_zero_centered_gamma)


@dataclass(frozen=True)
class Found:
    logits: torch.Tensor
    """After a prompt."""
    tokens: list[int]
    """Greedy ones."""
    accepted: int
    """Drafts that became tokens; 0 without layers of multi-token prediction."""


def run(shape: str, impl: str, graphs: int, name: str = "cuda") -> Found:
    """A prompt, and 16 tokens. Tiny models are float32, and lively."""
    device, architecture = torch.device(name), DUMMY_SHAPES[shape]
    is_tiny, with_mtp = shape.startswith("tiny-"), bool(architecture.mtp_pattern)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    model = load_model(
        f"dummy:{shape}", dtype, device, transformer_impl=impl, with_mtp=with_mtp
    ).model
    table = [*weights(architecture), *(mtp_weights(architecture) if with_mtp else ())]
    parameters = model_parameters(named_tensors(model), table)
    generator = torch.Generator(device).manual_seed(0)
    for weight in table:  # dummy norms are ones and biases zeros: equal wherever they end up
        if len(weight.shape) == 1:
            mean = 0.0 if weight.name.endswith("bias") else 1.0
            parameters[weight.name].normal_(mean, 0.3, generator=generator)
        else:
            std = weight.shape[-1] ** -0.5 if is_tiny else 0.02
            parameters[weight.name].normal_(0.0, std, generator=generator)
    config = InferenceConfig(
        device=name, num_kv_blocks=8, max_requests=2, max_tokens=64, max_sequence_length=128,
        num_cuda_graphs=graphs, speculative_method="mtp" if with_mtp else None,
    )  # fmt: skip
    context = DynamicInferenceContext(model.config, config)
    wrapper = LogitsKeeper(model, context)
    controller = TextGenerationController(wrapper)
    controller.create_cuda_graphs()
    assert (controller.graphs.count > 0) == (graphs > 0)
    engine = DynamicInferenceEngine(controller, context)
    prompt = list(range(7, 47))
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=1, termination_id=-1)
    engine.generate([prompt], params)
    logits = wrapper.logits.float().cpu()
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=16, termination_id=-1)
    tokens = engine.generate([prompt], params)[0].generated_tokens
    accepted = int(engine.stats()["accepted_tokens"])
    engine.close()
    return Found(logits, list(tokens), accepted)


OF_ALL_KINDS = ["tiny-moe", "tiny-hybrid", "tiny-gated-delta", "tiny-hybrid-mtp", "tiny-mtp"]


@pytest.mark.parametrize("shape", OF_ALL_KINDS)
def test_layers_of_every_kind_around_stand_ins(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms inside the products after them compute what our layers do, of a trunk and of drafts."""
    ours = run(shape, "local", 0, "cpu")
    for stood_for, name in ((column, "TELayerNormColumnParallelLinear"), (norm, "TENorm"),
                            (row, "TERowParallelLinear")):  # fmt: skip
        monkeypatch.setattr(transformer_engine_spec, name, stood_for)
    monkeypatch.setattr(transformer_engine_spec, "require_transformer_engine", lambda device: None)
    theirs = run(shape, "transformer_engine", 0, "cpu")
    torch.testing.assert_close(theirs.logits, ours.logits, rtol=1e-3, atol=1e-4)
    assert (theirs.tokens, theirs.accepted) == (ours.tokens, ours.accepted)
    assert len(set(ours.tokens)) > 4


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_TE, reason="needs TransformerEngine")
@pytest.mark.parametrize(
    "shape", ["tiny", "smollm2-135m", "qwen2-0.5b", "qwen3-0.6b", *OF_ALL_KINDS]
)
def test_transformer_engine_layers_compute_what_ours_do(shape: str):
    ours = run(shape, "local", graphs=0).logits
    theirs = run(shape, "transformer_engine", graphs=0)
    assert theirs.logits.shape == ours.shape
    assert (theirs.logits - ours).norm() < 0.02 * ours.norm()
    assert run(shape, "transformer_engine", graphs=4).tokens == theirs.tokens
