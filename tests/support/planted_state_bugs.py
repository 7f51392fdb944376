"""Bugs for the fuzzer, planted one at a time to see that they are found (see `planted_bugs`): of
recurrent states, of multi-token prediction (none changes a token), of steps that are cut short."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.device_state import recurrent_state
from megatron_async.device_state.pools import Pools
from megatron_async.engine.step_booking import StepBooking
from megatron_async.engine.turn import Turn
from megatron_async.interrupts import HeldInterrupts
from megatron_async.ops import all_ops
from megatron_async.ops.drafting.draft_tokens import lay_out_entries
from megatron_async.ops.drafting.hidden_states import keep_hidden
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.prefix_cache import PrefixCache
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.planning.state_rows import StateRows
from megatron_async.rollback.slot_shadows import SlotShadows

PREFILLS = ("mamba_prefill", "delta_prefill")
OPS = all_ops.Ops(torch.device("cpu"))
"""What runs on a CPU: loops, or the references where Numba is not."""
Change = Callable[..., tuple[Any, ...]]
"""From arguments of a prefill to those of a wrong one."""


def _plant(monkeypatch: pytest.MonkeyPatch, **ops: Callable[..., Any]) -> None:
    """Engines that are made from now on bind these instead."""
    for name, changed in ops.items():
        monkeypatch.setattr(getattr(all_ops, name), "on", lambda *_, to=changed: to)


def _plant_in_prefill(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """In the prefill op of every kind of recurrent layer."""

    def changed(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: op(*change(*arguments))

    _plant(monkeypatch, **{name: changed(getattr(OPS, name)) for name in PREFILLS})


def state_of_the_last_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's first chunk goes on from what its slot holds."""

    def goes_on(inputs: Any, params: Any, pools: Any, rows: Any, base: Any, *others: Any) -> Any:
        # Nothing is read at position 0: this is the same chunk, further on.
        moved = rows._replace(first_positions=rows.first_positions.clamp(min=128))
        return inputs, params, pools, moved, base + 128, *others

    _plant_in_prefill(monkeypatch, goes_on)


def short_chunks_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's history is lost at chunks of one and two tokens (Megatron-Core 0.19.2)."""

    def forgets(inputs: Any, params: Any, pools: Any, rows: Any, *others: Any) -> Any:
        lengths = rows.starts.diff()
        for row in rows.read_rows[(lengths > 0) & (lengths < 3)].tolist():
            pools.conv[row] = 0
        return inputs, params, pools, rows, *others

    _plant_in_prefill(monkeypatch, forgets)


def drafts_are_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """States take over tokens up to the step's last, accepted or not."""

    def too_far(base: Any, slots: Any, positions: Any, width: int, *others: Any) -> Any:
        return OPS.next_bases(base, slots, positions + width - 1, width, *others)

    _plant(monkeypatch, next_bases=too_far)


def states_do_not_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """States hold tokens of steps that rollback may take back."""
    rule = recurrent_state.FlushRule

    def without_lag(period: int = 16, lag: int = 0) -> Any:
        return rule(period, 0)

    monkeypatch.setattr(recurrent_state, "FlushRule", without_lag)


def chunks_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that was taken back is run on the state after it."""
    monkeypatch.setattr(SlotShadows, "repeats_chunks", True)


def snapshot_of_the_wrong_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot holds the state after the scan chunk before its own."""
    plan = StateRows.plan

    def one_off(rows: StateRows, *arguments: Any) -> Any:
        states = plan(rows, *arguments)
        dests = states.chunk_dest
        moved = [*dests[1:], -1] if len(dests) > 1 and dests[0] < 0 else dests
        return replace(states, chunk_dest=np.array(moved, dtype=np.int32))

    monkeypatch.setattr(StateRows, "plan", one_off)


def snapshot_without_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding leaves lacks the inputs of the convolution."""
    flush = OPS.flush

    def flush_states_alone(pools: Any, *arguments: Any) -> None:
        conv = pools.conv.clone()
        flush(pools, *arguments)
        pools.conv.copy_(conv)

    _plant(monkeypatch, flush=flush_states_alone)


def snapshot_behind_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding leaves is found under the block before its own."""
    decoded = StateRows.decoded

    def at_the_block_before(rows: StateRows, slot: int, end: int, step: int) -> int:
        return decoded(rows, slot, max(end - rows.unit, rows.unit), step)

    monkeypatch.setattr(StateRows, "decoded", at_the_block_before)


def snapshot_in_use_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that a request begins from is given to another in the same step."""
    monkeypatch.setattr(StateRows, "_is_in_use", lambda rows, row, step: False)


def states_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes on from a state with the last block before it computed again."""
    find = PrefixCache._find

    def shorter(cache: PrefixCache, *arguments: Any) -> Any:
        found = find(cache, *arguments)
        if cache.states is None or found.length < 2:
            return found
        return found._replace(blocks=found.blocks[:-1], length=found.length - 1)

    monkeypatch.setattr(PrefixCache, "_find", shorter)


RECURRENT_BUGS = [
    state_of_the_last_owner,
    short_chunks_forget,
    drafts_are_flushed,
    snapshot_of_the_wrong_chunk,
    snapshot_without_inputs,
    snapshot_behind_its_tokens,
    snapshot_in_use_is_given_away,
    states_without_blocks,
]
ROLLBACK_BUGS = [states_do_not_lag, chunks_run_twice]
"""Few schedules meet them; `models/test_hybrid.py` has one that does."""


def hidden_states_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins from the hidden state that somebody else has left in its block."""
    monkeypatch.setattr(keep_hidden, "on", lambda *_: lambda *_: None)


def drafts_have_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are reserved for a row's own tokens alone."""
    monkeypatch.setattr(RequestSlots, "with_drafts", lambda slots, places: places)


def entries_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft is made from the last token that was verified, accepted or not."""
    lay_out = lay_out_entries.reference

    def lay_out_to_the_end(view: Any, sampled: Any) -> Any:
        entries, dims = lay_out(view, sampled), view.dims
        if dims.decode_rows:
            entries.last[: dims.decode_rows] += dims.width - 1
            entries.last[: dims.decode_rows].clamp_(max=dims.decode_tokens - 1)
        return entries

    monkeypatch.setattr(lay_out_entries, "on", lambda *_: lay_out_to_the_end)


def entries_of_repeated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is computed again makes an entry in the shared block, as if it were new."""
    lay_out = lay_out_entries.reference

    def lay_out_as_new(view: Any, sampled: Any) -> Any:
        view.step.features &= ~int(RowFeature.REPEATS)
        return lay_out(view, sampled)

    monkeypatch.setattr(lay_out_entries, "on", lambda *_: lay_out_as_new)


MTP_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    hidden_states_are_not_kept,
    drafts_have_no_places,
    entries_of_rejected_drafts,
    entries_of_repeated_tokens,
)


def interrupts_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C takes effect between any two bytecodes."""
    monkeypatch.setattr(HeldInterrupts, "begin", lambda held, holder: None)


def half_booked_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step that was cut short has stored counts, though nobody was told of it."""
    mend = StepBooking.mend

    def mend_without(booking: StepBooking, cause: BaseException) -> None:
        booking._known = None
        mend(booking, cause)

    monkeypatch.setattr(StepBooking, "mend", mend_without)


def books_are_not_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cut short stays as it is."""

    def think_it_whole(turn: Any) -> None:
        turn._is_whole = True

    monkeypatch.setattr(Turn, "_make_whole", think_it_whole)


INTERRUPT_BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    interrupts_are_not_held,
    half_booked_tokens_stay,
    books_are_not_mended,
]


def a_copy_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspend copies keys and values, and what is remembered of slots comes back as zeros."""
    save = Pools.save

    def save_blocks(pools: Pools, *arguments: Any) -> None:
        save(pools, *arguments)
        pools._copies = {n: c for n, c in pools._copies.items() if n.startswith("keys")}

    monkeypatch.setattr(Pools, "save", save_blocks)


def copies_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on at a cache that comes back empty."""
    monkeypatch.setattr(Pools, "restore", lambda pools, device: pools._copies.clear())


def lost_blocks_stay_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was given back without a copy is thought to be whole."""
    monkeypatch.setattr(DynamicInferenceContext, "evict_all", lambda context, **_: None)


SLEEP_BUGS = [a_copy_without_states, copies_count_as_none, lost_blocks_stay_known]
