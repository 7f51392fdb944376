"""A start imports what it uses: no compiler of torch, whose functions are compiled when called."""

import subprocess
import sys

import pytest
import torch

from megatron_async.models import compile_later
from megatron_async.models.compile_later import compile_later as later

START = """
import sys
import torch
import megatron_async.llm
from megatron.core.fusions import fused_bias_geglu
from megatron_async.devices import cuda
from megatron_async.ops.all_ops import Ops

torch.cuda.get_device_capability = lambda device: (9, 0)
Ops(torch.device("cuda"))
print(*sys.modules)
assert torch.compile.__module__ == "torch"
"""
NEEDLESS = (
    "torch._dynamo", "torch._inductor", "transformers", "numba", "pandas", "scipy", "datasets",
    "flash_attn", "transformer_engine", "ray", "starlette", "uvicorn", "megatron_async.server",
    "megatron_async.compat", "megatron_async.lab", "megatron_async.serving",
)  # fmt: skip


def test_what_a_start_on_a_gpu_does_not_use_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert "triton" in found
    assert [name for name in found if f"{name}.".startswith(tuple(f"{n}." for n in NEEDLESS))] == []


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
