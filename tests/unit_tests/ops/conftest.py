"""For tests of kernels: the device they run on, and memory in which a gap is seen."""

import pytest
import torch
from triton.runtime import interpreter as runtime

from tests.unit_tests.ops.quicker_interpreter import make_quicker
from tests.unit_tests.ops.triton_interpreter import (
    INTERPRETED,
    multiply_as_matrix_units,
    patch_index,
    patch_language_once_a_launch,
    round_to_e4m3,
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the interpreter run the tests that need it: the others run in the process before."""
    if INTERPRETED:
        others = [item for item in items if {"device", "interpreter"}.isdisjoint(item.fixturenames)]
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that ask for the device run on a GPU, but for the interpreter's."""
    if not INTERPRETED and "device" in getattr(item, "fixturenames", ()):
        item.add_marker("gpu")


@pytest.fixture(scope="session", autouse=True)
def better_interpreter():
    """Triton's interpreter, patched for NumPy 2.5 and made quicker (`triton_interpreter.py`,
    `quicker_interpreter.py`)."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if INTERPRETED:
            patch = patch_language_once_a_launch(runtime._patch_lang)
            monkeypatch.setattr(runtime, "_patch_lang", patch)
            patch = patch_index(runtime._patch_lang_tensor)
            monkeypatch.setattr(runtime, "_patch_lang_tensor", patch)
            patch = round_to_e4m3(runtime._convert_float)
            monkeypatch.setattr(runtime, "_convert_float", patch)
            make_quicker(monkeypatch)
        yield


@pytest.fixture
def device() -> str:
    """Where kernels run: "cpu" in the interpreter, else "cuda"."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter add up as those of a GPU."""
    if INTERPRETED:
        monkeypatch.setattr(runtime.InterpreterBuilder, "create_dot", multiply_as_matrix_units)


@pytest.fixture
def interpreter() -> None:
    """For tests of several processes that do with the CPU what other tests do with GPUs."""
    if not INTERPRETED:
        pytest.skip("test_in_interpreter runs it")


@pytest.fixture
def poisoned_memory():
    """torch.empty is full of NaN (or the largest integer), so what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
