"""`transformer_impl`: clear errors where TransformerEngine cannot run, our logits where it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
from megatron_async.checkpoints.mapping import weights
from megatron_async.checkpoints.source import model_parameters
from megatron_async.cli import main as cli
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.transformer_engine_spec import HAVE_TE, require_transformer_engine
from megatron_async.parity.references import LogitsKeeper

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


def run(shape: str, impl: str, graphs: int) -> tuple[torch.Tensor, list[int]]:
    """Logits after a prompt, and 16 greedy tokens."""
    device = torch.device("cuda")
    model = load_model(f"dummy:{shape}", torch.bfloat16, device, transformer_impl=impl).model
    table = list(weights(DUMMY_SHAPES[shape]))
    parameters = model_parameters(model, table)
    generator = torch.Generator(device).manual_seed(0)
    for weight in table:  # dummy norms are ones and biases zeros: equal wherever they end up
        if len(weight.shape) == 1:
            mean = 0.0 if weight.name.endswith("bias") else 1.0
            parameters[weight.name].normal_(mean, 0.3, generator=generator)
        else:
            parameters[weight.name].normal_(0.0, 0.02, generator=generator)
    config = InferenceConfig(
        device="cuda", num_kv_blocks=8, max_requests=2, max_tokens=64, max_sequence_length=128,
        num_cuda_graphs=graphs,
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
    engine.close()
    return logits, tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not HAVE_TE, reason="needs TransformerEngine")
@pytest.mark.parametrize("shape", ["tiny", "smollm2-135m", "qwen2-0.5b", "qwen3-0.6b"])
def test_transformer_engine_layers_compute_what_ours_do(shape: str):
    ours, _ = run(shape, "local", graphs=0)
    theirs, tokens = run(shape, "transformer_engine", graphs=0)
    assert theirs.shape == ours.shape
    assert (theirs - ours).norm() < 0.02 * ours.norm()
    _, captured = run(shape, "transformer_engine", graphs=4)
    assert captured == tokens
