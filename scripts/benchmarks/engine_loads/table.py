"""Columns of the loads' tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def heads(titles: Iterable[str], width: int) -> str:
    """Titles of columns of so many characters, right-aligned."""
    return "".join(f"{title:>{width}}" for title in titles)


def cells(row: Mapping[str, Any], columns: Iterable[str], width: int, form: str = ".3f") -> str:
    """A row's numbers in columns of so many characters; "nan" for what was not measured."""
    return "".join(f"{row.get(column, math.nan):>{width}{form}}" for column in columns)
