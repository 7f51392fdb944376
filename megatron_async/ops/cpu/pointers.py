"""Compiled loops called by their addresses, so that a loop has one machine code.

What Numba compiles gets copies of the functions it calls, and LLVM optimises each copy anew. Where
a sum may be reordered, two copies may differ in the last bit. So a row's result would depend on the
loop's caller, and on the thread. Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def call_at(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Call the loop at an address with a tuple of arguments, which have the types that `address_of`
    was given. It returns nothing."""
    kinds = tuple(types.unliteral(kind) for kind in arguments.types)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention = context.call_conv
        function = convention.get_function_type(types.none, kinds)
        loop = builder.inttoptr(args[0], function.as_pointer())
        places = [
            cgutils.alloca_once(builder, kind.pointee, zfill=True) for kind in function.args[:2]
        ]
        values = cgutils.unpack_tuple(builder, args[1])
        packed = context.get_arg_packer(kinds).as_arguments(builder, values)
        code = builder.call(loop, [*places, *packed])
        status = convention._get_return_status(builder, code, builder.load(places[1]))
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


def address_of(loop: Any, *kinds: Any) -> int:
    """The address of a loop for arguments of these types; it is compiled, or read from where Numba
    keeps it."""
    loop.compile(kinds)
    (found,) = (result for key, result in loop.overloads.items() if key == kinds)
    address: int = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
    return address
