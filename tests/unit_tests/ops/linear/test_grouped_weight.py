"""Which weights are made of 4-bit integers: those of such files, exactly, and no others."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from megatron_async.ops.linear.cpu.grouped_weight import TOLERANCE, find_grid

Kind = GGMLQuantizationType


def from_file(kind: Kind, outputs: int = 24, k: int = 512) -> Tensor:
    """Weights of a GGUF type, whose blocks have random integers and plausible scales."""
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (outputs * k // block, size), np.uint8)
    halves = 1 if kind in (Kind.Q4_0, Kind.Q8_0) else 2
    scales = generator.uniform(0.001, 0.01, (len(blocks), halves)).astype(np.float16)
    blocks[:, : 2 * halves] = scales.view(np.uint8)
    return torch.from_numpy(quants.dequantize(blocks, kind).astype(np.float32)).view(outputs, k)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
def test_files_of_four_bits(kind: Kind) -> None:
    weight = from_file(kind)
    found = find_grid(weight)
    assert found is not None
    integers, scales, offsets = found
    assert integers.dtype == torch.uint8
    assert integers.max() == 15
    again = (integers * scales[..., None] + offsets[..., None]).flatten(1)
    assert (again - weight).abs().max() <= TOLERANCE * weight.abs().max()


def test_other_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 512, generator=generator)
    for other in (weight, weight.bfloat16().float(), from_file(Kind.Q8_0), from_file(Kind.Q5_1)):
        assert find_grid(other) is None
    assert find_grid(from_file(Kind.Q4_1)[:, :500]) is None


def test_one_weight_off_its_grid_is_enough() -> None:
    weight = from_file(Kind.Q4_0, k=4096)
    weight[-1, -7] *= 1.001
    assert find_grid(weight) is None


def test_groups_of_few_steps_and_of_equal_weights() -> None:
    weight = torch.zeros(2, 64)
    weight[0, 3], weight[1, :32], weight[1, 40:50] = 0.7, -0.3, torch.arange(10) / 7
    found = find_grid(weight)
    assert found is not None
    integers, scales, offsets = found
    again = (integers * scales[..., None] + offsets[..., None]).flatten(1)
    assert (again - weight).abs().max() <= TOLERANCE
