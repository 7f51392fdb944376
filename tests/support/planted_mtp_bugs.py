"""Bugs of multi-token prediction for the fuzzer to find, none of which changes a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.ops.drafting.draft_tokens import lay_out_entries
from megatron_async.ops.drafting.hidden_states import keep_hidden
from megatron_async.ops.sampling.slot_records import RowFeature


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
