"""Figures of benchmarks as plots take them: of many records the newest, of one machine alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs/performance"
OTHERS = FOLDER / "others.json"
"""Figures of other engines, with their source; drawn only beside records of the same GPU."""

Row = dict[str, Any]


@cache
def others() -> Row:
    """The figures of other engines."""
    found: Row = json.loads(OTHERS.read_text("utf-8"))
    return found


def by_batch(figures: dict[str, float], batches: Sequence[int]) -> dict[int, float]:
    """Figures whose batch lies within those that are plotted."""
    numbers = {int(batch): value for batch, value in figures.items()}
    return {b: v for b, v in numbers.items() if min(batches) <= b <= max(batches)}


@dataclass(frozen=True)
class Figures:
    """All figures of one benchmark on one GPU."""

    rows: list[Row]
    gpu: str | None

    @property
    def beside_others(self) -> bool:
        """Whether the figures of others were measured on this GPU too."""
        return others()["gpu"] in (self.gpu or "")

    def values(self, key: str) -> list[Any]:
        """The values of one key, each once, in ascending order; known models by size."""
        known = list(others()["step_ms"]["by_model"])
        return sorted(
            {row[key] for row in self.rows},
            key=lambda value: (known.index(value) if value in known else len(known), value),
        )

    def select(self, **keys: Any) -> list[Row]:
        """The rows with these values."""
        return [row for row in self.rows if all(row[k] == v for k, v in keys.items())]


def read_records(folder: Path) -> list[Row]:
    """The benchmarks' records in a folder, oldest first."""
    records = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and "benchmark" in record:
            records.append({**record, "path": path.name})
    return sorted(records, key=lambda record: record["date"])


def collect(records: Iterable[Row], benchmark: str, keys: Sequence[str]) -> Figures | None:
    """The figures of one benchmark; of those that agree in `keys`, the newest. Records of sampled
    batches, and of decode at other prompts than the others' figures, are left out.

    Raises:
        ValueError: the records come from different GPUs, which one plot must not mix.
    """
    of_others = others()["prompt_tokens"]
    chosen = [
        record
        for record in records
        if record["benchmark"] == benchmark
        and not record["settings"].get("temperature")
        and (benchmark != "decode" or record["settings"]["prompt_tokens"] == of_others)
    ]
    gpus = {record["gpu"] for record in chosen}
    if len(gpus) > 1:
        names = ", ".join(f"{record['path']} ({record['gpu']})" for record in chosen)
        raise ValueError(f"one plot must not mix machines: {names}. Move the odd ones away.")
    newest = {
        tuple(row[key] for key in keys): short_model(row)
        for record in chosen
        for row in record["figures"]
    }
    return Figures(list(newest.values()), gpus.pop()) if newest else None


def short_model(row: Row) -> Row:
    """The row with "dummy:" taken off its model: random weights take as long as others."""
    if "model" not in row:
        return row
    return {**row, "model": row["model"].removeprefix("dummy:")}
