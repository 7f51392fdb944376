"""`where`, casts and loads of Triton's interpreter that work out types once, like the operators of
`quicker_operators.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.unit_tests.ops.quicker_operators import (
    Recorder,
    assert_same,
    attributes_of,
    key_of,
    token_of,
)

Method = Callable[..., Any]


def make_semantics_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch what kernels mean in this process until `monkeypatch` is undone."""
    for name, quicker in {"where": _where, "cast": _cast, "_load_legacy": _load}.items():
        monkeypatch.setattr(TritonSemantic, name, quicker(getattr(TritonSemantic, name)))


def _where(original: Method) -> Method:
    """`where` of tensors that NumPy broadcasts, or of numbers that were spread before."""
    decisions: dict[Any, Any] = {}
    builder = interpreter.interpreter_builder

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        if self.builder is not builder:
            return original(self, condition, x, y)
        key = token_of(condition.type), key_of(x), key_of(y)
        if (None,) in key:
            return original(self, condition, x, y)
        if key not in decisions:
            recorder = Recorder(builder)
            result = original(TritonSemantic(recorder), condition, x, y)
            decisions[key] = _where_decision(recorder, (condition, x, y), result)
            return result
        if decisions[key] is None:
            return original(self, condition, x, y)
        numbers, attributes = decisions[key]
        handles = [
            operand.handle if number is None else number
            for operand, number in zip((condition, x, y), numbers, strict=True)
        ]
        return _tensor(builder.create_select(*handles), attributes)

    return where


def _where_decision(recorder: Recorder, operands: Any, result: Any) -> Any:
    """For each operand None or the number's handle, and a result's attributes; None where a tensor
    is cast."""
    name, handles = recorder.last
    assert name == "create_select"
    numbers: list[Any] = []
    for operand, handle in zip(operands, handles, strict=True):
        is_tensor = type(operand) is core.tensor
        if is_tensor and recorder.source(handle) is not operand.handle:
            return None
        numbers.append(None if is_tensor else handle)
    own = [h if n is None else n for h, n in zip(map(recorder.source, handles), numbers)]
    assert_same(interpreter.interpreter_builder.create_select(*own), result.handle)
    return numbers, attributes_of(result)


def _cast(original: Method) -> Method:
    """A cast that is one operation of the builder."""
    decisions: dict[Any, Any] = {}
    builder = interpreter.interpreter_builder

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if self.builder is not builder:
            return original(self, input, dst_ty, fp_downcast_rounding)
        if input.type.scalar is dst_ty.scalar:
            return input
        key = token_of(input.type), token_of(dst_ty), fp_downcast_rounding
        if key not in decisions:
            recorder = Recorder(builder)
            result = original(TritonSemantic(recorder), input, dst_ty, fp_downcast_rounding)
            name, arguments = recorder.last
            if recorder.calls == 1 and arguments[0] is input.handle and result is not input:
                decisions[key] = name, arguments[1:], attributes_of(result)
            else:
                decisions[key] = None
            return result
        if decisions[key] is None:
            return original(self, input, dst_ty, fp_downcast_rounding)
        name, arguments, attributes = decisions[key]
        return _tensor(getattr(builder, name)(input.handle, *arguments), attributes)

    return cast


def _load(original: Method) -> Method:
    """A load of a block, whose mask and other values are not copied to its shape."""
    results: dict[Any, dict[str, Any]] = {}
    builder = interpreter.interpreter_builder

    def load(self: Any, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
        type, (checked, padding, *caching) = ptr.type, options
        is_plain = type.is_block() and type.scalar.is_ptr() and not (checked or padding)
        if not is_plain or self.builder is not builder or (mask is None and other is not None):
            return original(self, ptr, mask, other, *options)
        key = token_of(type)
        if key not in results:
            result = original(self, ptr, mask, other, *options)
            if type.scalar.element_ty == core.int1:
                return result  # which was a number of 8 bits first
            results[key] = attributes_of(result)
            return result
        if mask is None:
            return _tensor(builder.create_load(ptr.handle, *caching), results[key])
        shape = ptr.handle.data.shape
        handles = [_spread(mask.handle, shape), None]
        if other is not None:
            handles[1] = _spread(self.cast(other, type.scalar.element_ty).handle, shape)
        return _tensor(builder.create_masked_load(ptr.handle, *handles, *caching), results[key])

    return load


def _spread(handle: Any, shape: tuple[int, ...]) -> Any:
    if handle.data.shape == shape:
        return handle
    return interpreter.TensorHandle(np.broadcast_to(handle.data, shape), handle.dtype)


def _tensor(handle: Any, attributes: dict[str, Any]) -> Any:
    result = object.__new__(core.tensor)
    vars(result).update(attributes, handle=handle)
    return result
