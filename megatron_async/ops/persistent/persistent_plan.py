"""How a kernel of all layers is divided: programs, and what each has in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from megatron_async.ops.persistent.messages import MOST_TOGETHER
from megatron_async.ops.persistent.weight_ring import CHUNK

WARPS = 8
"""Of a program; each has a row of weights at a time."""
DIMS = (64, 128)
"""Of heads: so a key is eight elements of 8 or 16 lanes."""
MOST_UNIT_CHUNKS = 8
"""Chunks of a unit: 4 KB a warp."""
MOST_SLOTS = 16
LEAST_SLOTS = 3
"""With fewer, less than 64 KB of each processor's weights are on their way."""
TILE = 64
"""Keys that a program attends to at a time."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes that all layers of a dense decoder have in common, elements."""

    hidden: int
    ffn: int
    kv_heads: int
    group: int
    """Query heads of a KV head."""
    dim: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def qkv(self) -> int:
        """Outputs of the qkv product."""
        return self.kv_heads * (self.group + 2) * self.dim


@dataclass(frozen=True)
class PersistentPlan:
    """Constants of the kernel, by their names there."""

    programs: int
    """At most one a processor."""
    parts: int
    """Most parts of a sequence's keys: programs that attend for the same KV head."""
    slots: int
    """Units of the ring: of weights that are on their way, or there."""
    unit_chunks: int
    """Chunks of a row that are a unit."""
    hidden_padded: int
    """Places of a vector of `hidden` numbers in shared memory, a power of two; so the next two."""
    heads_padded: int
    ffn_padded: int

    @property
    def slot_width(self) -> int:
        """Weights of a row in a slot of the ring."""
        return triton.next_power_of_2(self.unit_chunks * CHUNK.value)

    def constants(self, sizes: LayerSizes, block_size: int) -> dict[str, int]:
        """All constants of the kernel."""
        return {
            "hidden": sizes.hidden,
            "ffn": sizes.ffn,
            "kv_heads": sizes.kv_heads,
            "group": sizes.group,
            "dim": sizes.dim,
            "block_size": block_size,
            "programs": self.programs,
            "parts": self.parts,
            "slots": self.slots,
            "unit_chunks": self.unit_chunks,
            "slot_width": self.slot_width,
            "hidden_padded": self.hidden_padded,
            "heads_padded": self.heads_padded,
            "ffn_padded": self.ffn_padded,
            "group_padded": triton.next_power_of_2(sizes.group),
            "parts_padded": triton.next_power_of_2(self.parts),
            "members": triton.next_power_of_2(sizes.group + 2),
            "tile": TILE,
            "warps": WARPS,
        }

    def words(self, sizes: LayerSizes) -> int:
        """Words that programs send: of each phase of a layer, and of parts of attention."""
        of_parts = sizes.heads * self.parts * (sizes.dim + 1)
        return sizes.qkv + sizes.heads * sizes.dim + 2 * sizes.hidden + sizes.ffn + of_parts


def plan_layers(sizes: LayerSizes, processors: int, shared_bytes: int) -> PersistentPlan | None:
    """The division for a device of so many processors, each with so many bytes of shared memory for
    a program; None: the kernel does not serve these sizes there.

    All programs have an output of fc1, which the kernel relies on; and with as few rounds of
    outputs as the device needs there are no more programs than that takes. Words that a thread
    reads at a time are of one vector.
    """
    vectors = (sizes.hidden, sizes.heads * sizes.dim, sizes.ffn)
    if sizes.dim not in DIMS or any(size % MOST_TOGETHER.value for size in vectors):
        return None
    chunk = CHUNK.value
    unit_chunks = min(triton.cdiv(sizes.hidden, chunk), MOST_UNIT_CHUNKS)
    rounds = triton.cdiv(sizes.ffn, processors * WARPS)
    programs = triton.cdiv(sizes.ffn, rounds * WARPS)
    if programs < sizes.heads:
        return None
    hidden, heads, ffn = (_padded(size, unit_chunks * chunk) for size in vectors)
    members = triton.next_power_of_2(sizes.group + 2) * sizes.dim
    slot = 2 * WARPS * triton.next_power_of_2(unit_chunks * chunk)
    others = 4 * max(hidden, heads, ffn, members) + 4 * TILE * sizes.dim + 4 * hidden
    # The compiler's, for sums over warps: of attention's outputs.
    scratch = 4 * WARPS * triton.next_power_of_2(sizes.group) * sizes.dim
    slots = min((shared_bytes - scratch - others) // slot, MOST_SLOTS)
    if slots < LEAST_SLOTS:
        return None
    parts = programs // sizes.kv_heads
    return PersistentPlan(programs, parts, slots, unit_chunks, hidden, heads, ffn)


def _padded(size: int, unit: int) -> int:
    """A vector's place: whole units, a power of two, and two elements a thread at least."""
    return int(triton.next_power_of_2(max(triton.cdiv(size, unit) * unit, 64 * WARPS)))
