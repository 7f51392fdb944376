"""`GenerationBar`: the progress line of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from tqdm import tqdm

from megatron_async.observe.statistics import CountedEngine

EVERY_S = 0.1
"""The line is written so often; in between, a step costs nothing for it."""
REPORTED_WHEN_NOT_ZERO = ("waiting_requests", "pauses", "evictions")
"""Statistics that the line shows where there is something to show."""


class GenerationBar:
    """A line on stderr with tokens, tokens a second and prompts that have ended, if stderr is a
    terminal. How many tokens will come nobody knows, so there is no bar to fill.

    Args:
        engine: idle, before its first step for these prompts.
        prompts: how many.
        shown: False: nothing is written.
    """

    def __init__(self, engine: CountedEngine, prompts: int, shown: bool) -> None:
        self._engine = engine
        self._prompts = prompts
        self._ended = 0
        self._before = engine.statistics.generated_tokens
        self._last = -EVERY_S
        self._bar = tqdm(unit="token", desc="generate", disable=None if shown else True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, report: Mapping[str, Any]) -> None:
        """Take in what `step_modern` returned."""
        if self._bar.disable:
            return
        self._ended += len(report["finished_request_records"])
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed - self._last >= EVERY_S or self._ended == self._prompts:
            self._last = elapsed
            prompts = f"{self._ended}/{self._prompts} prompts"
            rows = len(report["active_request_ids"])
            self._bar.set_postfix_str(f"{prompts}, {line(self._engine.stats(), rows)}", False)
            tokens = self._engine.statistics.generated_tokens - self._before
            self._bar.update(tokens - self._bar.n)


def line(stats: Mapping[str, Any], rows: int) -> str:
    """The part of the line after the tokens."""
    parts = [f"{rows} rows", f"overlap {stats['overlap_ratio']:.2f}"]
    parts += [
        f"{stats[key]} {key.removesuffix('_requests')}"
        for key in REPORTED_WHEN_NOT_ZERO
        if stats[key]
    ]
    return ", ".join(parts)
