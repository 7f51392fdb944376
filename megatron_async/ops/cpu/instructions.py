"""Instructions that loops are written in. Imported only where loops are compiled."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

BYTE, SHORT, WORD, LONG, REAL = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())


def constant(value: int) -> Any:
    """A number of 64 bits."""
    return ir.Constant(LONG, value)


class Writer:
    """Writes instructions, where llvmlite's builder is. An address is an integer."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, kind: Any, address: Any, offset: int = 0, align: int = 1) -> Any:
        """What is at an address, so many bytes on."""
        place = self.builder.add(address, constant(offset))
        return self.builder.load(self.builder.inttoptr(place, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Put a value at an address."""
        place = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, place, align=align)

    def everywhere(self, value: Any, kind: Any) -> Any:
        """A vector of a kind with one value in all places."""
        first, zeros = ir.Constant(WORD, 0), ir.Constant(ir.VectorType(WORD, kind.count), None)
        vector = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, first)
        return self.builder.shuffle_vector(vector, vector, zeros)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """An instruction by its name in LLVM."""
        module, name = self.builder.module, f"llvm.{name}"
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, arguments)
