"""Operators of tensors in Triton's interpreter that work out types once for each pair of types.

Triton 3.6 decides for each `x + y` anew which casts and shapes it needs and which of the builder's
operations it is, and spreads a number over a block of its own before it adds it. That takes ten
times as long as the addition. Here Triton decides the first time, and what it decided is done
again for operands of the same types: NumPy broadcasts by itself. The first result of each kind is
compared with Triton's own, so results are the same to the bit.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Operation = Callable[[TritonSemantic, Any, Any], Any]
"""An operation of a semantic and two operands."""

SHAPING = {"create_splat": -1, "create_expand_dims": 0, "create_broadcast": 0}
"""What the builder does to operands that NumPy does as well, and which argument is the operand."""
TOKENS = itertools.count()


class Decision(NamedTuple):
    """What Triton decided about two types, or about a type and a number (`number` is its handle):
    the builder's operation, whether the second operand comes first, and all attributes of a result
    but its handle."""

    operation: Callable[[Any, Any], Any]
    number: Any
    is_swapped: bool
    result: dict[str, Any]


class Recorder:
    """The interpreter's builder, with a count of what it was asked to create, the last call with
    its arguments, and whether a call before that is more than a change of shape."""

    def __init__(self, builder: Any) -> None:
        self.last: tuple[str, tuple[Any, ...]] = ("", ())
        self.has_cast = False
        self.calls = 0
        self._builder = builder
        self._sources: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._builder, name)
        if not name.startswith("create_"):
            return value

        def create(*args: Any) -> Any:
            self.has_cast |= self.calls > 0 and self.last[0] not in SHAPING
            self.last = name, args
            self.calls += 1
            result = value(*args)
            if name in SHAPING:
                self._sources.append((result, args[SHAPING[name]]))
            return result

        return create

    def source(self, handle: Any) -> Any:
        """The handle that this one had its numbers from, in another shape."""
        for shaped, source in reversed(self._sources):
            if shaped is handle:
                handle = source
        return handle


def make_operators_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch tensors of this process until `monkeypatch` is undone."""
    for name in ("add", "sub", "mul"):
        _replace(monkeypatch, name, _overflowing(name))
    for name in ("truediv", "floordiv", "mod", "and_", "or_", "xor_"):
        _replace(monkeypatch, name.strip("_"), _plain(name))
    comparisons = {
        "lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal",
        "eq": "equal", "ne": "not_equal",
    }  # fmt: skip
    for name, method in comparisons.items():
        _replace(monkeypatch, name, _comparison(method))


def token_of(type: Any) -> int:
    """A number that equal types have in common; blocks have theirs from `quicker_interpreter`."""
    if not hasattr(type, "token"):
        type.token = _tokens.setdefault(type, next(TOKENS))
    return type.token


_tokens: dict[Any, int] = {}


def _overflowing(name: str) -> Operation:
    return lambda semantic, left, right: getattr(semantic, name)(left, right, True)


def _plain(name: str) -> Operation:
    return lambda semantic, left, right: getattr(semantic, name)(left, right)


def _comparison(name: str) -> Operation:
    return lambda semantic, left, right: getattr(semantic, name)(left, semantic.to_tensor(right))


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, operation: Operation) -> None:
    monkeypatch.setattr(core.tensor, f"__{name}__", _operator(operation))
    if hasattr(core.tensor, f"__r{name}__"):
        swapped = lambda semantic, left, right: operation(semantic, right, left)  # noqa: E731
        monkeypatch.setattr(core.tensor, f"__r{name}__", _operator(swapped))


def _operator(operation: Operation) -> Callable[[Any, Any], Any]:
    decisions: dict[Any, Decision | None] = {}
    tensor, constexpr, new = core.tensor, core.constexpr, object.__new__

    def operator(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is constexpr:
            other = other.value
            kind = type(other)
        try:
            if kind is tensor:
                key: Any = self.type.token, other.type.token
            else:
                key = self.type.token, kind, other
            decision = decisions[key]
        except (AttributeError, KeyError, TypeError):
            return decide(self, other)
        if decision is None:
            return operation(interpreter.interpreter_semantic, self, other)
        result = new(tensor)
        values = result.__dict__
        values.update(decision.result)
        right = other.handle if decision.number is None else decision.number
        if decision.is_swapped:
            values["handle"] = decision.operation(right, self.handle)
        else:
            values["handle"] = decision.operation(self.handle, right)
        return result

    def decide(self: Any, other: Any) -> Any:
        recorder = Recorder(interpreter.interpreter_builder)
        result = operation(TritonSemantic(recorder), self, other)
        key = token_of(self.type), *key_of(other)
        if None not in key:
            decisions[key] = _decision(self, other, recorder, result)
        return result

    return operator


def _decision(self: Any, other: Any, recorder: Recorder, result: Any) -> Decision | None:
    """What was decided; None where a tensor is cast, or is no operand of the last call."""
    name, operands = recorder.last
    if len(operands) != 2:
        return None
    operation = getattr(interpreter.interpreter_builder, name)
    number = None
    if type(other) is core.tensor:
        if recorder.has_cast:
            return None
        left, right = map(recorder.source, operands)
        own = other.handle
    else:
        left, right = operands
        number = own = left if right is self.handle else right
    for is_swapped, first, second in (False, self.handle, own), (True, own, self.handle):
        if left is first and right is second:
            assert_same(operation(first, second), result.handle)
            return Decision(operation, number, is_swapped, attributes_of(result))
    return None


def key_of(operand: Any) -> tuple[Any, ...]:
    """The token of a tensor, or a number; None for others, for NaN, and for 0.0, which equals
    -0.0."""
    kind = type(operand)
    if kind is core.tensor:
        return (token_of(operand.type),)
    if kind in (int, bool) or (kind is float and operand == operand and operand):
        return kind, operand
    return (None,)


def attributes_of(result: Any) -> dict[str, Any]:
    """All but the handle: what tensors of a type have in common."""
    return {key: value for key, value in vars(result).items() if key != "handle"}


def assert_same(found: Any, expected: Any) -> None:
    """Compare all bits; but where Triton made numbers of a mask that it spread, a mask is right."""
    same = expected.data.astype(bool) if found.data.dtype == bool else expected.data
    assert found.dtype == expected.dtype, (found, expected)
    assert found.data.dtype == same.dtype, (found, expected)
    assert found.data.shape == same.shape, (found, expected)
    assert found.data.tobytes() == same.tobytes(), (found, expected)
