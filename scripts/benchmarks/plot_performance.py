"""Draw the plots of docs/records from the benchmarks' records.

Reads every *.json of a folder (the `--json` output of benchmark_engine.py under the loads steady,
churn and throughput, and of benchmark_kernels.py --family decode_attention) and writes one picture
for each kind of plot that it finds figures for (`PLOTS`). Of
figures for the same case the newest record's count. Other engines' figures come from `others.json`,
which names their source.
Needs matplotlib, which the dev extra brings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from performance_plots import (
    plot_churn,
    plot_decode_attention,
    plot_lookahead,
    plot_step_time,
    plot_throughput,
)
from plot_records import FOLDER, Figures, collect, read_records

PLOTS: dict[str, tuple[str, tuple[str, ...], Callable[[Figures], Figure]]] = {
    "step_time": ("decode", ("model", "batch", "lookahead"), plot_step_time),
    "lookahead": ("decode", ("model", "batch", "lookahead"), plot_lookahead),
    "churn": ("churn", ("model", "batch", "lookahead"), plot_churn),
    "throughput": ("throughput", ("model", "rate", "lookahead"), plot_throughput),
    "decode_attention": ("decode_attention", ("shape", "rows", "length"), plot_decode_attention),
}
"""Picture: the benchmark that it shows, what tells its rows apart, and its drawing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what there are records for; name each picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--records", type=Path, default=FOLDER, metavar="DIR", help=f"default {FOLDER}"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where pictures go (default: beside the records)"
    )
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(arguments)
    output = args.output or args.records
    records = read_records(args.records)
    if not records:
        parser.error(
            f"no records in {args.records}: run a benchmark with --json {args.records}/NAME.json"
        )
    output.mkdir(parents=True, exist_ok=True)
    style = {
        "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "lines.linewidth": 1.4,
        "lines.markersize": 4.5, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#DDDDDD", "axes.axisbelow": True,
        "svg.hashsalt": "megatron_async",
    }  # fmt: skip
    for name, (benchmark, keys, draw) in PLOTS.items():
        figures = collect(records, benchmark, keys)
        if figures is None:
            continue
        path = output / f"{name}.{args.format}"
        with matplotlib.rc_context(style):
            figure = draw(figures)
            # No date: equal records give equal files.
            metadata = {"Date": None} if args.format == "svg" else None
            figure.savefig(path, dpi=150, metadata=metadata)
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
