"""Bugs of block tables with windows, each planted by a patch."""

import pytest

from megatron_async.planning.prefix_cache import PrefixCache
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


def at_least_under_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts steps that are taken back."""
    init = Scheduler.__init__

    def forgetful(self: Scheduler, *arguments: object, **options: object) -> None:
        init(self, *arguments, **options)  # type: ignore[arg-type]
        self._least = None

    monkeypatch.setattr(Scheduler, "__init__", forgetful)


def a_hit_without_the_windows_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is found by the blocks of full layers alone, and what it lacks is another's."""
    first = PrefixCache._first

    def of_one_key(self: PrefixCache, window: int, count: int, known: int) -> int:
        return min(first(self, 1, count, known), count)

    monkeypatch.setattr(PrefixCache, "_first", of_one_key)


WINDOW_BUGS: list[Plant] = [
    a_block_one_step_early,
    a_window_from_at_most,
    at_least_under_rollback,
    a_hit_without_the_windows_blocks,
]
