"""What an op is: its reference, its implementations, and how an engine binds them."""

import pytest
import torch
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops import all_ops
from megatron_async.ops import op as op_file
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.activations import swiglu
from megatron_async.ops.op import Op, op, promising


def twice(x: Tensor) -> Tensor:
    """Twice x."""
    return x + x


def test_an_op_without_an_implementation_names_what_there_is() -> None:
    made = op(twice)
    assert made.on("torch") is made.on("cpu") is made.reference
    assert made.__doc__ == twice.__doc__
    with pytest.raises(ConfigurationError, match=r"'twice' has no .* 'gpu': .*there are: torch\."):
        made.on("gpu")


def test_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first implementation that keeps all of them; else an error names op and promise."""
    made, steady = op(twice), frozenset({"steady"})
    fast = made.gpu(lambda x: x + x)
    slow = made.gpu(promising("steady")(lambda x: x + x))
    with pytest.raises(ConfigurationError, match=r"'steady'.*unknown.*.invariant."):
        made.on("gpu", steady)
    monkeypatch.setattr(op_file, "PROMISES", steady | {"quiet"})
    assert made.on("gpu") is fast
    assert made.on("gpu", steady) is slow
    assert made.supported() == ["gpu", "gpu (keeps steady)", "torch"]
    with pytest.raises(ConfigurationError, match=r"'twice' has no .*keeps .'steady'.*, torch"):
        made.on("cpu", steady)
    with pytest.raises(ConfigurationError, match=r"keeps .'quiet'"):
        made.on("gpu", frozenset({"quiet"}))


def test_every_op_is_bound_to_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every op has an implementation for a GPU."""
    ops = {name: made for name, made in vars(all_ops).items() if isinstance(made, Op)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for device, place, major in (("cuda", "gpu", 9), ("meta", "torch", 0)):
        bound = vars(Ops(torch.device(device)))
        assert (bound.pop("major"), bound.pop("is_invariant")) == (major, False)
        assert bound == {name: made.on(place) for name, made in ops.items()}
    assert all(made.name == name for name, made in ops.items())


def test_what_cannot_keep_a_promise_says_so_when_it_is_called(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kept = frozenset({"invariant"})
    ops = Ops(torch.device("cuda"), kept)
    assert ops.is_invariant
    assert ops.route is all_ops.route.on("gpu", kept) is not all_ops.route.on("gpu")
    assert ops.swiglu is swiglu.on("gpu")
    on_cpu = Ops(torch.device("cpu"), kept)
    with pytest.raises(ConfigurationError, match=r"'route' has no .* keeps .'invariant'"):
        on_cpu.route()
    with pytest.raises(ConfigurationError, match="loud"):
        Ops(torch.device("cuda"), frozenset({"loud"}))


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    if compiler.compiles():
        assert Ops(cpu).swiglu is swiglu.on("cpu") is not swiglu.reference
    compiler.compiles.cache_clear()
    try:
        monkeypatch.setenv(compiler.SWITCH, "torch")
        assert Ops(cpu).swiglu is swiglu.reference
        compiler.compiles.cache_clear()
        monkeypatch.setenv(compiler.SWITCH, "fast")
        with pytest.raises(ValueError, match="use 'numba' or 'torch'"):
            Ops(cpu)
    finally:
        compiler.compiles.cache_clear()
