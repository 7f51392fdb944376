"""A start imports what it uses: not torch's compiler, and of Megatron-Core what its models need."""

import subprocess
import sys

import pytest
import torch

from megatron_async.models import compile_later
from megatron_async.models.compile_later import compile_later as later

START = """
import sys
import torch, triton
least = set(sys.modules)
import megatron_async.llm
from megatron_async.checkpoints import open_model
from megatron_async.devices import cuda
from megatron_async.models.hybrid import build_model
from megatron_async.ops.all_ops import Ops

build_model(open_model("dummy:tiny-hybrid").architecture, torch.bfloat16, torch.device("cpu"))
torch.cuda.get_device_capability = lambda device: (9, 0)
Ops(torch.device("cuda"))
print(*sys.modules.keys() - least)
assert torch.compile.__module__ == "torch"
"""
MOST = 600
"""Modules that a start imports beside those of torch and Triton; three quarters are this package's
and Megatron-Core's."""
NEEDLESS = (
    "torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor._api",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "setuptools", "einops.einops",
    "torch.distributed._functional_collectives", "yaml.reader", "transformers", "numba", "pandas",
    "scipy", "datasets", "flash_attn", "transformer_engine", "ray", "starlette", "uvicorn", "gguf",
    "megatron.core.optimizer.optimizer", "megatron.core.transformer.moe.experts",
    "megatron_async.server", "megatron_async.compat", "megatron_async.lab",
    "megatron_async.serving", "megatron_async.checkpoints.torch_dist",
)  # fmt: skip


def run(program: str) -> list[str]:
    """The words that a new process prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_a_start_on_a_gpu_does_not_use_is_not_imported() -> None:
    found = run(START)
    assert "megatron.core" in found
    assert [name for name in found if f"{name}.".startswith(tuple(f"{n}." for n in NEEDLESS))] == []
    assert len(found) <= MOST


LATER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
import megatron_async.llm
from megatron_async.models.compile_later import LATER, LaterModule, LaterName

names = [(n, k, v) for n, m in sys.modules.items() for k, v in vars(m).items()
         if type(v) is LaterName]
assert {n.split(".")[0] for n, _, _ in names} == {"megatron"}
assert [n for n in LATER if type(sys.modules[n]) is not LaterModule] == []
assert not any(isinstance(x, LaterName) for x in torch.serialization.get_safe_globals())
import megatron.core
from megatron.core import DistributedDataParallel, utils
from megatron.core.models.hybrid.hybrid_block import FusedMLASelfAttention
assert type(DistributedDataParallel) is LaterName
with ThreadPoolExecutor(4) as pool:
    assert len(set(pool.map(lambda _: DistributedDataParallel.found(), range(4)))) == 1
assert type(megatron.core.DistributedDataParallel) is type
assert megatron.core.DistributedDataParallel is DistributedDataParallel.found()
assert type(FusedMLASelfAttention) is LaterName and isinstance(FusedMLASelfAttention, type)
class Own(DistributedDataParallel): pass
assert not isinstance(Own, LaterName) and issubclass(Own, DistributedDataParallel)
assert type(sys.modules["megatron.core.distributed"]) is not LaterModule
assert utils.to_local_if_dtensor(torch.ones(1)) == 1
assert isinstance(utils.DTensor.from_local, type(lambda: 0))
for _, _, value in names:
    assert value.found() is not None
assert torch.compile.__module__ == "torch"
assert [k for _, k, v in names if type(v._module) is LaterModule] == []
import megatron.core.dist_checkpointing as real
from torch.distributed.tensor import *
import yaml
print(real.save.__module__, DTensor.__name__, yaml.__version__.count("."))
"""


def test_what_is_imported_later_is_the_real_thing() -> None:
    assert run(LATER) == ["megatron.core.dist_checkpointing.serialization", "DTensor", "2"]


THREADS = """
import faulthandler, threading
from importlib import import_module
import megatron_async.llm
faulthandler.dump_traceback_later(60, exit=True)
barrier = threading.Barrier(3)

def ask(name):
    barrier.wait()
    try:
        getattr(import_module("megatron.core.dist_checkpointing" + name), "load", None)
    except (ImportError, RuntimeError):  # Python's, of threads that wait for each other
        pass

threads = [threading.Thread(target=ask, args=(n,)) for n in ("", ".validation", ".serialization")]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print("ended")
"""


def test_threads_that_import_at_once_do_not_wait_for_each_other() -> None:
    """Break it: give each `LaterModule` a lock of its own."""
    assert run(THREADS) == ["ended"]


USED = """
import copy, inspect, pickle, torch
import megatron_async.llm
from megatron.core.models.hybrid.hybrid_block import FusedMLASelfAttention as mla
from megatron.core.transformer.moe.moe_layer import MoEAllGatherTokenDispatcher as gather, MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
print(type(gather).__name__, type(mla).__name__)
str(inspect.signature(TransformerLayer.forward)), str(inspect.signature(MoELayer.__init__))
gather.mine = 3
dispatcher = gather.found()
assert dispatcher.mine == 3 and dispatcher == gather and gather == dispatcher
assert {dispatcher: 1}[gather] == 1 and gather.__module__ == dispatcher.__module__
assert issubclass(mla, torch.nn.Module) and (None | mla) == (mla | None) == mla.found() | None
assert pickle.loads(pickle.dumps(mla)) is copy.deepcopy(mla) is copy.copy(mla) is mla.found()
pickle.dumps(get_gpt_layer_local_spec(num_experts=4))
from megatron.core.dist_checkpointing.serialization import load
from megatron.core.pipeline_parallel.schedules import forward_step
import megatron.core.dist_checkpointing as whole
print(load is whole.load)
"""


def test_what_is_not_yet_imported_is_used_as_the_real_thing() -> None:
    """By pickles, copies, `inspect`, assignments, comparisons; a module of a package runs after the
    package.

    Break it: leave `__path__` in `LaterModule`; compare a `LaterName` by identity.
    """
    assert run(USED) == ["LaterName", "LaterName", "True"]


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
