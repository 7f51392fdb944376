"""For tests of kernels: the device they run on, and memory in which a gap is seen."""

import pytest
import torch
from triton.runtime import interpreter
from triton_interpreter import INTERPRETED, patch_index, patch_language_once_a_launch


@pytest.fixture(scope="session", autouse=True)
def better_interpreter():
    """See `patch_language_once_a_launch` and `patch_index`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if INTERPRETED:
            patch = patch_language_once_a_launch(interpreter._patch_lang)
            monkeypatch.setattr(interpreter, "_patch_lang", patch)
            patch = patch_index(interpreter._patch_lang_tensor)
            monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        yield


@pytest.fixture
def device() -> str:
    """Where kernels run: "cpu" in the interpreter, else "cuda"."""
    if INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("no GPU: test_in_interpreter runs it")


@pytest.fixture
def poisoned_memory():
    """torch.empty is full of NaN (or the largest integer), so what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
