"""Bugs of block tables with windows, each planted by a patch."""

import pytest

from megatron_async.planning.request_slots import RequestSlots
from megatron_async.planning.scheduler import Scheduler
from megatron_async.planning.window_tables import WindowTables
from tests.support.planted_bugs import Plant


def a_block_one_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block goes back while the next query sees its last key."""
    pass_by = WindowTables.pass_by
    monkeypatch.setattr(
        WindowTables, "pass_by", lambda self, slot, queries: pass_by(self, slot, queries + 1)
    )


def a_window_from_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound takes drafts for tokens."""
    leave = Scheduler._leave_behind

    def from_at_most(self: Scheduler, windows: WindowTables) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(RequestSlots, "at_least", RequestSlots.at_most)
            leave(self, windows)

    monkeypatch.setattr(Scheduler, "_leave_behind", from_at_most)


WINDOW_BUGS: list[Plant] = [
    a_block_one_step_early,
    a_window_from_at_most,
]
