"""The program of a step: what the layers' own forward asks of its ops, in words."""

import re

import pytest
import torch

from megatron_async.checkpoints.info import model_program
from megatron_async.cli import main as cli
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.layer_program import layer_program
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.experts.expert_plan import FEW_CHAINS
from megatron_async.ops.linear.products import INVARIANT


def of_h200(model, rows, tokens=None):
    return model_program(f"dummy:{model}", rows, tokens or rows, major=9)


def test_one_row_of_a_dense_model():
    lines = of_h200("smollm2-135m", 1)
    assert len(lines) == 62
    assert lines[0] == (
        "dummy:smollm2-135m, bfloat16, rows 1, tokens 1, on a GPU of compute capability 9"
    )
    assert lines[1::2][:30] == [
        f"layer {n}: norm + qkv + rope (one row), attention, proj + residual (one row)"
        for n in range(0, 60, 2)
    ]
    assert lines[60] == "layer 59: norm + fc1 + SwiGLU (resident), fc2 + residual (one row)"
    assert lines[61] == "end: norm, logits (one row)"


@pytest.mark.parametrize(
    ("model", "rows", "layer", "line"),
    [
        ("smollm2-135m", 64, 1, "residual + norm, fc1 + SwiGLU (warpgroup), "
         "fc2 (warpgroup, 2 parts)"),
        ("qwen3-0.6b", 1, 2, "norm + qkv (one row), q/k norms + rope + append, attention, "
         "proj (one row)"),
        ("qwen3-0.6b", 16, 1, "norm + fc1 + SwiGLU (resident), fc2 (tile, 8 parts)"),
        ("llama-3.1-8b", 1, 1, "residual + norm, fc1 + SwiGLU (one row), fc2 (long row)"),
        ("llama-3.1-8b", 64, 1, "residual + norm, fc1 + SwiGLU (streamed), "
         "fc2 (streamed, 2 parts)"),
        ("llama-3.1-8b", 512, 1, "residual + norm, fc1 (cuBLAS), swiglu, fc2 (cuBLAS)"),
        ("granite-4.0-h-350m", 1, 0, "norm + in_proj (one row), convolution + recurrence + gate, "
         "norm + out_proj + residual (one row)"),
        ("qwen3-30b-a3b", 1, 1, "norm + routing + experts + residual (few tokens, 3 kernels)"),
        ("qwen3-next-80b", 16, 1, "residual + norm, routing, experts (grouped products), "
         "fc1 + SwiGLU (tile), fc2 (resident), add shared expert"),
    ],
)  # fmt: skip
def test_layers(model, rows, layer, line):
    assert of_h200(model, rows)[layer + 1] == f"layer {layer}: {line}"


@pytest.mark.parametrize(
    "shape", ["smollm2-135m", "llama-3.1-8b", "qwen3-30b-a3b", "nemotron-3-nano-30b",
              "qwen3-next-80b"],
)  # fmt: skip
def test_a_program_that_does_not_depend_on_the_rows(shape):
    """With invariant ops: other kernels of one order, but the same roundings at the same places;
    one op for the experts of few tokens, into which a norm goes, and an addition to the stream."""
    known = {kernel.name for kernel in INVARIANT} | {"grouped products", "few tokens, 3 kernels"}
    model, found = build_model(DUMMY_SHAPES[shape], torch.bfloat16, torch.device("meta")), set()
    for rows in (1, 2, 16, 17, 64, 65, 256, 2048):
        lines = layer_program(model, BatchDimensions(rows), 9, is_invariant=True)
        assert {name for line in lines for name in re.findall(r"\((.*?)\)", line)} <= known
        if any("few tokens" in line for line in lines):
            assert rows <= FEW_CHAINS
        if any("routing" in line for line in lines):
            lines = [re.sub(r"(layer \d+:).* experts.*", r"\1 experts", line) for line in lines]
            lines = [line.replace("residual + ", "") for line in lines]
        # An activation in its product follows the rounded one, as its own kernel does.
        plain = [re.sub(r" \(.*?\)", "", line).lower() for line in lines]
        found.add(tuple(re.sub(r" \+ (swiglu|squared relu)", r", \1", line) for line in plain))
    (program,) = found
    assert program[-1] in ("end: residual + norm, logits", "end: norm, logits")


def test_a_prompt_beside_the_rows():
    """Products are those of all tokens; a Mamba-2 layer divides in decode steps alone, and logits
    are of the rows and of the prompt's last token."""
    lines = of_h200("granite-4.0-h-350m", 15, 40)
    assert "rows 15, tokens 40" in lines[0]
    assert "convolution + recurrence, gated rms norm, out_proj" in lines[1]
    assert lines[-1] == of_h200("granite-4.0-h-350m", 16)[-1]


def test_where_nothing_was_measured(capsys):
    assert cli.main(["info", "dummy:tiny", "--program", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on a CPU, whose products may have packed or 8-bit weights" in lines[0]
    assert lines[1] == "layer 0: norm, qkv (torch), rope + append, attention, proj (torch)"
    assert cli.main(["info", "dummy:tiny", "--program", "--gpu", "a100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "capability 8, where nothing was measured (it was on 9)" in lines[0]
    assert lines[2] == "layer 1: residual + norm, fc1 (cuBLAS), swiglu, fc2 (cuBLAS)"


@pytest.mark.parametrize(("rows", "tokens"), [(4, 2), (0, 0), (-1, 3)])
def test_shapes_of_no_step(rows, tokens):
    with pytest.raises(ConfigurationError, match=f"rows={rows} and tokens={tokens}: a step has"):
        model_program("dummy:tiny", rows, tokens, major=9)


def test_options_of_the_program_alone(capsys):
    assert cli.main(["info", "dummy:tiny", "--gpu", "h200"]) == 2
    assert "--gpu is of --program" in capsys.readouterr().err
