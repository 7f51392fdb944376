"""Stateless random numbers: Philox4x32-10 as a function of (seed, position, token id).

Philox is a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
as 1, 2, 3", SC 2011): ten rounds of multiply and exchange turn a 128-bit counter and a 64-bit key
into 128 random bits. No state exists, so nothing is saved, rolled back or re-seeded, and the
numbers do not depend on the batch, the schedule or the rank. Counter word 0 is token id // 4 and
word 1 the position; the four output words serve the four token ids of the group.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
KEY_STEP_0, KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
SMALL = 1 << 16
"""Numbers up to which a CPU computes them with NumPy, whose calls cost half of torch's."""


def philox4x32[Array: (Tensor, np.ndarray)](counter: list[Array], key: list[Array]) -> list[Array]:
    """The Philox4x32-10 bijection, of torch's tensors or of NumPy's arrays.

    Args:
        counter: four int64 arrays of one (broadcast) shape, values of 32 bits.
        key: two int64 arrays that broadcast against it, values of 32 bits.

    Returns:
        four int64 arrays, values of 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # 32 x 32 bits fit int64's 64 bits; the shift drags the sign along, hence the mask.
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        high0, high1 = (product0 >> 32) & MASK, (product1 >> 32) & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & MASK, high0 ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + KEY_STEP_0) & MASK, (k1 + KEY_STEP_1) & MASK
    return [c0, c1, c2, c3]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise for every row and token from `first` on.

    Args:
        seeds: int64 `[rows]`, not negative.
        positions: int32 or int64 `[rows]`: position of the sampled token in its sequence.
        vocab_size: number of token ids.
        first: the first of them.

    Returns:
        float32 `[rows, vocab_size]` on the same device.
    """
    rows = seeds.size(0)
    start, end = first // 4, (first + vocab_size + 3) // 4
    groups = torch.arange(start, end, device=seeds.device, dtype=torch.int64)[None, :]
    seeds, positions = seeds[:, None], positions.to(torch.int64)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    counter = [groups.expand(rows, -1), positions, zero, zero]
    key = [seeds & MASK, (seeds >> 32) & MASK]
    if seeds.device.type == "cpu" and rows * vocab_size <= SMALL:
        arrays = philox4x32([w.numpy() for w in counter], [w.numpy() for w in key])  # sync-ok: CPU
        words = [torch.from_numpy(array) for array in arrays]
    else:
        words = philox4x32(counter, key)
    bits = torch.stack(words, dim=-1).view(rows, -1)[:, first % 4 :][:, :vocab_size]
    # 23 bits and a half step: exactly representable in float32 and never 0 or 1.
    uniform = ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
