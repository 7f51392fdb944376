"""How long a test waits for what must come: an end for what hangs, never a bound on how fast."""

import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""Below pytest's own limit (300 s), whose traceback would not say what was waited for."""


def eventually(condition: Callable[[], object], what: str = "", every_s: float = 0.005) -> None:
    """Wait until `condition()` is true; an AssertionError with `what` after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what or condition}: not within {PATIENCE_S:g} s"
        time.sleep(every_s)
