"""Bugs of recurrent states, one by one, to be found by the fuzzer; see `planted_bugs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.contexts.prefix_cache import PrefixCache
from megatron_async.contexts.state_rows import StateRows
from megatron_async.device_state import recurrent_state
from megatron_async.ops import all_ops
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
    """In that of every kind of recurrent layer."""

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
        if cache.states is None or len(found.blocks) < 2:
            return found
        return found._replace(blocks=found.blocks[:-1])

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
