"""Options that every load has."""

from __future__ import annotations

import argparse


def load_parser(
    load: str, about: str | None, model: str = "dummy:smollm2-135m", several: bool = False
) -> argparse.ArgumentParser:
    """A load's command line with the options for the model, where it runs, and the record.

    Args:
        load: its name on the command line.
        about: the load's docstring.
        model: what is measured when nothing else is asked for.
        several: takes `--models`, a list; else `--model`.
    """
    parser = argparse.ArgumentParser(
        prog=f"benchmark_engine.py {load}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if several:
        parser.add_argument("--models", nargs="+", default=[model], help="anything that LLM loads")
    else:
        parser.add_argument("--model", default=model, help="anything that LLM loads")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    return parser
