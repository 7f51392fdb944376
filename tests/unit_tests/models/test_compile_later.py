"""Megatron-Core is imported without torch's compiler; a function is compiled when it is called."""

import subprocess
import sys

import pytest
import torch

from megatron_async.models import compile_later
from megatron_async.models.compile_later import compile_later as later


def test_the_compiler_is_not_imported() -> None:
    code = (
        "import sys, megatron_async.llm; from megatron.core.fusions import fused_bias_geglu; "
        "assert not any('torch._inductor.' in name for name in sys.modules); "
        "import torch; assert torch.compile.__module__ == 'torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_function_is_compiled_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def compiled(function: object, **options: object) -> object:
        asked.append((function, options))
        return function

    monkeypatch.setattr(compile_later, "COMPILE", compiled)

    @later
    def double(x: int) -> int:
        return 2 * x

    @later(dynamic=True)
    def triple(x: int) -> int:
        return 3 * x

    assert asked == []
    assert (double(2), double(3), triple(2), triple(3)) == (4, 6, 6, 9)
    assert [options for _, options in asked] == [{}, {"dynamic": True}]
    assert double.__name__ == "double"


def test_modules_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_later, "COMPILE", lambda model, **_: ("compiled", model))
    layer = torch.nn.Linear(1, 1)
    assert later(layer) == ("compiled", layer)
