"""Spare Triton's interpreter what takes most of its time: making the same types again and again.

Triton 3.6 makes a type, a shape and the type of that shape anew for each value that a kernel
computes, and a table of all dtypes for each load. Nothing changes them afterwards, so equal ones
may be one object. Results are the same to the bit, in less than half of the time.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from triton.language import core, standard
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.unit_tests.ops.quicker_operators import TOKENS, make_operators_quicker
from tests.unit_tests.ops.quicker_semantics import make_semantics_quicker

Method = Callable[..., None]


def make_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter of this process until `monkeypatch` is undone."""
    monkeypatch.setattr(core.pointer_type, "__hash__", core.dtype.__hash__)
    monkeypatch.setattr(core.block_type, "__init__", _block_type(core.block_type.__init__))
    monkeypatch.setattr(core.tensor, "__init__", _tensor(core.tensor.__init__))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _np_dtype(interpreter._get_np_dtype))
    broadcast = _broadcast(TritonSemantic.broadcast_impl_value)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
    builder = interpreter.interpreter_builder
    # Triton computes for each integer operation whether it overflows, and asks only in debug mode.
    assert not builder.options.debug
    options = replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_patch_builtin", _patch_builtin)
    reduce = _reduce(interpreter.ReduceOps.apply_impl)
    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", reduce)
    make_operators_quicker(monkeypatch)
    make_semantics_quicker(monkeypatch)


def _block_type(original: Method) -> Method:
    """`block_type.__init__` that fills in what it found before for this element and shape."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = element_ty, *[getattr(size, "value", size) for size in sizes]
        if key not in known:
            original(self, element_ty, shape)
            self.token = next(TOKENS)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return init


def _tensor(original: Method) -> Method:
    """`tensor.__init__` that takes the shape and size of the tensor before of the same shape."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            original(self, handle, type)
            known[key] = {"shape": self.shape, "numel": self.numel}
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(known[key])

    return init


def _broadcast(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """`broadcast_impl_value` that compares equal shapes once."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _np_dtype(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_get_np_dtype`, asked once for each dtype of an element."""
    known: dict[Any, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if element not in known:
            known[element] = original(element)
        return known[element]

    return np_dtype


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Let a launch have the functions of a package: which those are does not change."""
    if package not in _builtins:
        members = inspect.getmembers(package)
        _builtins[package] = [(name, value) for name, value in members if core.is_builtin(value)]
    for name, value in _builtins[package]:
        interpreter._patch_attr(package, name, value, builder, scope)


_builtins: dict[Any, list[tuple[str, Any]]] = {}


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions, of which Triton leaves `xor` (each step of a sort) to a loop in Python."""

    def apply_impl(self: Any, input: Any) -> Any:
        if self.combine_fn != standard._xor_combine or self.axis is None:
            return original(self, input)
        data = input[0].handle.data
        found = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, input[0].dtype)

    return apply_impl
