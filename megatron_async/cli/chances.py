"""The value of options `--forced-acceptance`."""

from __future__ import annotations

import argparse


def parse_chances(text: str) -> list[float]:
    """Chances of an option, "0.8,0.6,0.45".

    Raises:
        argparse.ArgumentTypeError: one is no number from 0 to 1.
    """
    try:
        chances = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: {error}") from error
    if not all(0 <= chance <= 1 for chance in chances):
        raise argparse.ArgumentTypeError(f"{text!r}: each chance must lie between 0 and 1")
    return chances
