"""Dequantisation against the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from megatron_async.checkpoints.gguf import _BLOCKS, _PLAIN, dequantise

Q = gguf.GGMLQuantizationType
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.gpu,
    ),
]


def random_rows(kind: gguf.GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """Rows of random bytes in the dtype of gguf's reader: every value, scale and bit occurs."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(kind).integers(0, 256, (rows, blocks * size), np.uint8)
    return data.view({Q.F32: np.float32, Q.F16: np.float16}.get(kind, np.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*_PLAIN, *_BLOCKS, Q.Q2_K, Q.Q3_K], ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_package(kind: gguf.GGMLQuantizationType, device: str):
    rows = random_rows(kind, rows=7, blocks=64)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
    found = dequantise(rows, kind, torch.device(device))
    assert found.dtype == torch.float32
    assert found.device.type == device
    torch.testing.assert_close(
        found.cpu(), torch.from_numpy(np.array(expected)), rtol=0, atol=0, equal_nan=True
    )


def test_a_format_that_nobody_reads():
    with pytest.raises(NotImplementedError):
        dequantise(random_rows(Q.Q8_1, 1, 1), Q.Q8_1, torch.device("cpu"))
