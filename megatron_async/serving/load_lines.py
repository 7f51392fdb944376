"""`LoadLines`: a line of log now and then on how busy a service is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVERY_S = 10.0


class LoadLines:
    """Says every `EVERY_S` seconds what a service does, while it does anything.

    Args:
        now: seconds.
    """

    def __init__(self, now: float) -> None:
        self._told, self._before = now, (0, 0)

    def line(self, stats: Mapping[str, Any], now: float) -> str:
        """The line that is due, or "".

        Args:
            stats: of the coordinator.
            now: seconds.
        """
        passed = now - self._told
        if passed < EVERY_S:
            return ""
        service = stats["service"]
        counts = service["prompt_tokens"], service["generated_tokens"]
        read, written = (new - old for new, old in zip(counts, self._before, strict=True))
        self._told, self._before = now, counts
        running, waiting = running_and_waiting(stats)
        if not (running or waiting or read or written):
            return ""
        engines = [replica["engine"] for replica in stats["replicas"].values()]
        blocks = sum(engine.get("kv_blocks", 0) for engine in engines)
        used = sum(engine.get("kv_blocks_in_use", 0) for engine in engines)
        return (
            f"Load: {running} running, {waiting} waiting; "
            f"{written / passed:.1f} tokens/s generated, "
            f"{read / passed:.1f} prompt tokens/s (of ended requests); "
            f"{used:.0f} of {blocks:.0f} KV blocks in use{_share(used, blocks)}."
        )


def _share(part: float, whole: float) -> str:
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def running_and_waiting(stats: Mapping[str, Any]) -> tuple[int, int]:
    """Requests that hold a slot, and those that wait for one.

    An engine's own figures are as old as its last answer to a ping, so that a request whose end is
    booked would run on for half a second: how many there are the coordinator's books say.
    """
    running, waiting = 0, int(stats["queued_requests"])
    for replica in stats["replicas"].values():
        engine, unfinished = replica["engine"], replica["unfinished_requests"]
        without_slot = min(int(engine.get("waiting_requests", 0)), unfinished)
        held = min(unfinished - without_slot, int(engine.get("slots", unfinished)))
        running, waiting = running + held, waiting + unfinished - held
    return running, waiting
