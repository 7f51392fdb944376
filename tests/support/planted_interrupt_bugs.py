"""Bugs of steps that are cut short, planted one at a time to see that they are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.engines.step_booking import StepBooking
from megatron_async.engines.turn import Turn
from megatron_async.interrupts import HeldInterrupts


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
