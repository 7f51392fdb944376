"""Weights that do not fit are told before they are made."""

import pytest
import torch

from megatron_async import LLM
from megatron_async.checkpoints.info import GIB, check_weights_fit
from megatron_async.devices import CpuDevice
from megatron_async.errors import OutOfMemoryError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.parallel_state import ParallelSizes

LLAMA = DUMMY_SHAPES["llama-3.1-8b"]  # 8.03 thousand million weights
ALONE = ParallelSizes()


def test_figures_and_remedy() -> None:
    with pytest.raises(OutOfMemoryError) as error:
        check_weights_fit(LLAMA, torch.float32, ALONE, 20 * GIB)
    assert "the weights take 29.9 GiB in float32, and 20 GiB of memory are free" in str(error.value)
    assert "In bfloat16 (dtype='bfloat16') they take 15 GiB." in str(error.value)
    with pytest.raises(OutOfMemoryError) as error:
        check_weights_fit(LLAMA, torch.bfloat16, ALONE, 10 * GIB)
    assert "bfloat16 (dtype" not in str(error.value)


def test_what_fits_passes() -> None:
    check_weights_fit(LLAMA, torch.bfloat16, ALONE, 15 * GIB)
    check_weights_fit(LLAMA, torch.float32, ParallelSizes(2), 15 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"a rank's share of the weights \(1 of 2\)"):
        check_weights_fit(LLAMA, torch.float32, ParallelSizes(2), 14 * GIB)


def test_nothing_is_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_memory", lambda _: 100_000)
    monkeypatch.setattr("megatron_async.llm.build_model", None)
    with pytest.raises(OutOfMemoryError, match="GiB of memory are free"):
        LLM("dummy:tiny", device="cpu")
