"""What Megatron's own code passes and what this engine passes, side by side, and the verdict."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Comparison:
    """Two runs of a test file.

    Attributes:
        file: its path in the checkout.
        control: by test, why it failed with Megatron's own code; "" if it passed. Skipped tests
            are left out.
        ours: the same with this engine's modules.
        listed: patterns of tests that do not count, each with its reason.
    """

    file: str
    control: Mapping[str, str | None] = field(default_factory=dict)
    ours: Mapping[str, str | None] = field(default_factory=dict)
    listed: Mapping[str, str] = field(default_factory=dict)

    def reason(self, test: str) -> str | None:
        """Why a test does not count; None if it does."""
        name = test.removeprefix(self.file).removeprefix("::")
        for pattern, reason in self.listed.items():
            if fnmatch.fnmatchcase(name, pattern):
                return reason
        return None

    @property
    def counted(self) -> list[str]:
        """Tests that pass with Megatron's own code, and are not on the list."""
        return [t for t, why in self.control.items() if why == "" and self.reason(t) is None]

    @property
    def left_out(self) -> list[str]:
        """Tests that pass with Megatron's own code, and are on the list."""
        return [t for t, why in self.control.items() if why == "" and self.reason(t) is not None]

    @property
    def lost(self) -> dict[str, str]:
        """Counted tests that do not pass with ours, and why."""
        return {
            test: why
            for test in self.counted
            if (why := self.ours.get(test, "not run: the file does not import, or time was up"))
        }

    @property
    def row(self) -> str:
        """A row of the table."""
        passed = len(self.counted) - len(self.lost)
        total = len([why for why in self.control.values() if why is not None])
        kept = len([why for why in self.control.values() if why == ""])
        cells = (self.file, f"{kept}/{total}", f"{passed}/{len(self.counted)}", len(self.left_out))
        return f"| {' | '.join(map(str, cells))} |"


HEAD = """\
| file | Megatron's own: passed/total | ours: passed/counted | on the list |
|---|---|---|---|"""


def table(comparisons: Iterable[Comparison]) -> str:
    """Rows of all files, and their sums."""
    every = list(comparisons)
    counted = sum(len(c.counted) for c in every)
    lost = sum(len(c.lost) for c in every)
    left_out = sum(len(c.left_out) for c in every)
    kept = sum(why == "" for c in every for why in c.control.values())
    total = sum(why is not None for c in every for why in c.control.values())
    last = f"| all | {kept}/{total} | {counted - lost}/{counted} | {left_out} |"
    return "\n".join([HEAD, *(c.row for c in every), last])


def lost_tests(comparisons: Iterable[Comparison]) -> list[str]:
    """A line for each test that Megatron's own code passes and ours should and does not."""
    return [f"{test}: {why}" for c in comparisons for test, why in c.lost.items()]
