"""Gumbel noise of token ids as a compiled loop: the numbers of `ops/sampling/philox.py`.

Imported only where loops are compiled. No sum is reordered here, so a token's noise is the same
bits in every loop that has a copy of these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from megatron_async.ops.cpu.float_math import log
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.sampling import philox

GROUPS = 16
"""Groups of four token ids whose noise is made at once."""
TOKENS = 4 * GROUPS
MOST_NOISE = np.float32(16.64)
"""No token's noise is larger: uniform numbers end at 1 - 2**-24."""
ROUNDS = philox.ROUNDS
_STEPS, _MASK = (philox.KEY_STEP_0, philox.KEY_STEP_1), philox.MASK
_UNUSED = np.uint32(9)
_HALF, _FINEST = np.float32(0.5), np.float32(2.0**-23)
_WORD = ir.IntType(32)
_WORDS, _PRODUCTS = ir.VectorType(_WORD, GROUPS), ir.VectorType(ir.IntType(64), GROUPS)


@intrinsic
def _fill_words(typingctx: Any, keys: Any, position: Any, group: Any, words: Any) -> Any:
    """Random words, written as vectors: LLVM does not make any of a loop over groups. Takes the
    addresses of `keys` and `words`, position and group as int64; see `fill_numbers`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def splat(word: Any) -> Any:
            one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, _WORD(0))
            return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * GROUPS))

        def parts(words: Any, multiplier: int) -> tuple[Any, Any]:
            """High and low words of 64-bit products."""
            factor = ir.Constant(_PRODUCTS, [multiplier] * GROUPS)
            product = builder.mul(builder.zext(words, _PRODUCTS), factor)
            high = builder.lshr(product, ir.Constant(_PRODUCTS, [32] * GROUPS))
            return builder.trunc(high, _WORDS), builder.trunc(product, _WORDS)

        keys = builder.inttoptr(args[0], _WORD.as_pointer())
        first = splat(builder.trunc(args[2], _WORD))
        c0 = builder.add(first, ir.Constant(_WORDS, list(range(GROUPS))))
        c1, c2 = splat(builder.trunc(args[1], _WORD)), ir.Constant(_WORDS, [0] * GROUPS)
        c3 = c2
        for number in range(ROUNDS):
            k0, k1 = (
                splat(builder.load(builder.gep(keys, [_WORD(place)])))
                for place in (number, ROUNDS + number)
            )
            high0, low0 = parts(c0, philox.MULTIPLIER_0)
            high1, low1 = parts(c2, philox.MULTIPLIER_1)
            c0 = builder.xor(builder.xor(high1, c1), k0)
            c2 = builder.xor(builder.xor(high0, c3), k1)
            c1, c3 = low1, low0
        out = builder.inttoptr(args[3], _WORDS.as_pointer())
        for number, word in enumerate((c0, c1, c2, c3)):
            builder.store(word, builder.gep(out, [_WORD(number)]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@njit(inline="always")
def set_keys(low: Any, high: Any, keys: Any) -> None:  # pragma: no cover - compiled
    """Keys of the rounds, uint32 `[2, ROUNDS]`, of a seed's two words of 32 bits."""
    for i in range(ROUNDS):
        keys[0, i] = np.uint32((low + i * _STEPS[0]) & _MASK)
        keys[1, i] = np.uint32((high + i * _STEPS[1]) & _MASK)


@njit(inline="always")
def fill_numbers(
    keys: Any, position: Any, group: Any, words: Any, numbers: Any
) -> None:  # pragma: no cover - compiled
    """Random numbers of `TOKENS` token ids from group `group` of four on, for the token at
    `position`: float32 whole numbers of 23 bits. `words`: uint32 `[4, GROUPS]`, for this function's
    own use."""
    _fill_words(keys.ctypes.data, position, group, words.ctypes.data)
    one, two, three, four = words[0], words[1], words[2], words[3]
    for i in range(GROUPS):
        numbers[4 * i] = np.float32(np.int32(one[i] >> _UNUSED))
        numbers[4 * i + 1] = np.float32(np.int32(two[i] >> _UNUSED))
        numbers[4 * i + 2] = np.float32(np.int32(three[i] >> _UNUSED))
        numbers[4 * i + 3] = np.float32(np.int32(four[i] >> _UNUSED))


@njit(inline="always")
def gumbel(number: Any) -> Any:  # pragma: no cover - compiled
    """Gumbel noise of a number of `fill_numbers`."""
    return -log(-log((number + _HALF) * _FINEST))


@njit(inline="always")
def rest_of(number: Any) -> Any:  # pragma: no cover - compiled
    """What the uniform number behind `gumbel` leaves of one. It is more than exp(-x) where the
    noise is at most x."""
    return np.float32(1.0) - (number + _HALF) * _FINEST
