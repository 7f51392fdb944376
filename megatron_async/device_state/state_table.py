"""`StateTable`: which rows of the state pools a step reads and writes, if states are shared.

A request's row is stored by slot, like its block table. For each prefill chunk, the plan has the
row, the row from which the chunk begins, and the rows for snapshots of its scan; it also has the
rows for snapshots of decode rows (`planning/state_rows.py`). One kernel reads these from the step's
bookkeeping, because a captured step's addresses are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.recurrent_pools import GRID

COUNTS = 3
"""Words at the start of a step's section: numbers of saves, prefill chunks, scan chunks."""
TILE = 128


@dataclass(frozen=True)
class StateSharing:
    """Settings of shared recurrent states; the same on all ranks of a model."""

    snapshots: int
    """Rows for snapshots, beside the rows of the slots."""
    limit: int
    """Most snapshots at once."""
    interval: int
    """Tokens between snapshots inside a prompt; 0: none."""

    def settings(self, config: InferenceConfig) -> dict[str, int | None]:
        """Fields of `InferenceConfig` that give the same whatever the memory of a rank."""
        has_budget = (config.num_state_snapshots, config.prefix_caching_mamba_gb) != (None, None)
        return {
            "num_state_snapshots": self.snapshots if has_budget else None,
            "prefix_caching_mamba_gb": None,
            "prefix_caching_mamba_interval": self.interval,
        }


@dataclass(frozen=True)
class StatePlan:
    """Rows of the state pools that a step reads and writes, where recurrent states may be shared.
    All int32."""

    write_rows: np.ndarray
    """`[prefill chunks]`: the row of each chunk's request."""
    read_rows: np.ndarray
    """`[prefill chunks]`: where the state before each chunk is: in that row, or in a snapshot's."""
    chunk_dest: np.ndarray
    """`[scan chunks]`: rows that get the state behind each, -1 for none (`mamba_prefill`)."""
    save_slots: np.ndarray
    """`[saves]`: slots of decode rows whose state, as it is before their token, is kept."""
    save_rows: np.ndarray
    """`[saves]`: where."""


@dataclass
class StepStates:
    """Pool rows that one step reads and writes; int32, padded to the step's shape."""

    rows: Tensor
    """`[rows]`: the pool row of each row's request."""
    read_rows: Tensor
    """`[prefill rows]`: where the state before each chunk is."""
    saves: Tensor
    """`[decode rows]`: the pool row that gets the state before the row's token, -1 for none."""
    chunk_dest: Tensor
    """`[scan chunks]`: see `mamba_prefill`."""

    def head(self, dims: BatchDimensions) -> StepStates:
        """Views for a step of this shape."""
        return StepStates(
            self.rows[: dims.rows],
            self.read_rows[: dims.prefill_rows],
            self.saves[: dims.decode_rows],
            self.chunk_dest[: _scan_chunks(dims.prefill_rows, dims.prefill_tokens)],
        )


class StateTable:
    """Each slot's row, and the rows of a step from its bookkeeping. One slot more, for rows without
    a request, has `dummy_row`. Writer and reader: steps, on the compute stream."""

    def __init__(
        self, slots: int, dummy_row: int, max_rows: int, max_tokens: int, device: torch.device
    ) -> None:
        self._dummy_row = dummy_row
        self._row_of_slot = torch.full((slots + 1,), dummy_row, dtype=torch.int32, device=device)
        counts = (max_rows, max_rows, max_rows, _scan_chunks(max_rows, max_tokens))
        self._largest = StepStates(
            *(torch.zeros(count, dtype=torch.int32, device=device) for count in counts)
        )

    def unpack(
        self, words: Tensor, entry: Tensor, dims: BatchDimensions, row_slots: Tensor
    ) -> StepStates:
        """Read a step's section of its bookkeeping."""
        out = self._largest.head(dims)
        take = unpack_states if words.is_cuda else unpack_states_reference
        take(words, entry, dims, row_slots, self._row_of_slot, self._dummy_row, out)
        return out


def words_of_states(max_rows: int, max_tokens: int) -> int:
    """Words of bookkeeping that no step's section exceeds."""
    return COUNTS + 4 * max_rows + _scan_chunks(max_rows, max_tokens)


def pack_states(words: np.ndarray, end: int, states: StatePlan) -> int:
    """Append a step's section at word `end`; returns the words in use."""
    parts = (
        (len(states.save_slots), len(states.write_rows), len(states.chunk_dest)),
        states.save_slots,
        states.save_rows,
        states.write_rows,
        states.read_rows,
        states.chunk_dest,
    )
    for part in parts:
        words[end : end + len(part)] = part
        end += len(part)
    return end


def _scan_chunks(rows: int, tokens: int) -> int:
    """The most scan chunks of so many prefill rows with so many tokens."""
    return tokens // GRID + 2 * rows


def unpack_states(
    words: Tensor,
    entry: Tensor,
    dims: BatchDimensions,
    row_slots: Tensor,
    row_of_slot: Tensor,
    dummy_row: int,
    out: StepStates,
) -> None:
    """Store the rows of requests that prefill by slot, and fill `out`; see `StateTable.unpack`."""
    _unpack_states_kernel[(dims.rows,)](
        words,
        words.stride(0),
        entry,
        BookkeepingLayout.for_batch(dims, 0).start("states"),
        row_slots,
        row_of_slot,
        out.rows,
        out.read_rows if dims.prefill_rows else out.rows,
        out.saves if dims.decode_rows else out.rows,
        out.chunk_dest if dims.prefill_rows else out.rows,
        dims.decode_rows,
        dims.prefill_rows,
        out.chunk_dest.numel(),
        dummy_row,
        COUNTS,
        TILE,
        **launch_options(words),
    )


def unpack_states_reference(
    words: Tensor,
    entry: Tensor,
    dims: BatchDimensions,
    row_slots: Tensor,
    row_of_slot: Tensor,
    dummy_row: int,
    out: StepStates,
) -> None:
    """`unpack_states` in plain torch; it reads numbers back, so it is for the CPU and for tests."""
    given = words[int(entry)]
    start = int(given[BookkeepingLayout.for_batch(dims, 0).start("states")])
    if not start:
        out.rows.copy_(row_of_slot[row_slots])
        for tensor, value in (
            (out.rows[dims.decode_rows :], dummy_row),
            (out.read_rows, dummy_row),
            (out.saves, -1),
            (out.chunk_dest, -1),
        ):
            tensor.fill_(value)
        return
    saves, chunks, scans = given[start : start + COUNTS].tolist()  # sync-ok: CPU
    sizes = (saves, saves, chunks, chunks, scans)
    section = given[start + COUNTS : start + COUNTS + sum(sizes)]
    slots, places, write_rows, read_rows, chunk_dest = section.split(sizes)
    decode = dims.decode_rows
    own = row_slots[decode : decode + chunks]
    row_of_slot[own] = write_rows
    out.rows.copy_(row_of_slot[row_slots])
    out.rows[decode + chunks :] = dummy_row
    out.read_rows.fill_(dummy_row)
    out.read_rows[:chunks] = read_rows
    out.chunk_dest.fill_(-1)
    out.chunk_dest[:scans] = chunk_dest
    saved = row_slots[:decode, None] == slots
    out.saves.copy_(torch.where(saved, places, -1).amax(1) if saves else row_slots.new_tensor(-1))


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "section_field",
        "decode_rows",
        "prefill_rows",
        "num_dests",
        "dummy_row",
    ],
    do_not_specialize_on_alignment=["row_slots"],
)
def _unpack_states_kernel(
    words: tl.tensor,
    words_stride: tl.tensor,
    entry: tl.tensor,
    section_field: tl.tensor,
    row_slots: tl.tensor,
    row_of_slot: tl.tensor,
    out_rows: tl.tensor,
    out_reads: tl.tensor,
    out_saves: tl.tensor,
    out_dests: tl.tensor,
    decode_rows: tl.tensor,
    prefill_rows: tl.tensor,
    num_dests: tl.tensor,
    dummy_row: tl.tensor,
    counts: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row = tl.program_id(0)
    step = words + tl.load(entry).to(tl.int64) * words_stride
    start = tl.load(step + section_field)
    section = step + start
    has_section = start > 0
    saves = tl.load(section, mask=has_section, other=0)
    chunks = tl.load(section + 1, mask=has_section, other=0)
    scans = tl.load(section + 2, mask=has_section, other=0)
    slot = tl.load(row_slots + row)
    section += counts
    each = tl.arange(0, tile)
    if row < decode_rows:
        tl.store(out_rows + row, tl.load(row_of_slot + slot))
        place = tl.full((), -1, tl.int32)
        first = 0
        while first < saves:
            number = first + each
            exists = number < saves
            own = exists & (tl.load(section + number, exists, other=-1) == slot)
            found = tl.load(section + saves + number, own, other=-1)
            place = tl.maximum(place, tl.max(found, 0))
            first += tile
        tl.store(out_saves + row, place)
    else:
        chunk = row - decode_rows
        exists = chunk < chunks
        section += 2 * saves
        own = tl.load(section + chunk, mask=exists, other=0)
        read = tl.load(section + chunks + chunk, mask=exists, other=0)
        tl.store(row_of_slot + slot, own, mask=exists)
        tl.store(out_rows + row, tl.where(exists, own, dummy_row))
        tl.store(out_reads + chunk, tl.where(exists, read, dummy_row))
        section += 2 * chunks
        first = chunk * tile
        while first < num_dests:
            number = first + each
            dest = tl.load(section + number, mask=number < scans, other=-1)
            tl.store(out_dests + number, dest, mask=number < num_dests)
            first += prefill_rows * tile
