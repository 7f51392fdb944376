"""Draw the plots of docs/performance.md from the benchmarks' records.

Reads every *.json of a folder (the `--json` output of benchmark_decode.py, benchmark_churn.py,
benchmark_throughput.py and benchmark_decode_attention.py) and writes one picture for each kind of
plot that it finds figures for. Of figures for the same case the newest record's count. Needs
matplotlib, which the dev extra brings.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parents[2] / "docs/performance"

# The palette of Okabe and Ito, "Color universal design" (2008): told apart by colour-blind readers.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#8C8C8C",
)
LOOKAHEAD_STYLES = ((ORANGE, "s"), (BLUE, "o"), (GREEN, "^"), (PURPLE, "v"))

VLLM = "vLLM 0.24.0, async scheduling"
MEGATRON = "Megatron-Core 0.19.2, async, best backend"
FLOOR = "bytes over 4.3 TB/s"
OTHERS_GPU = "H200"
"""The figures of others below are drawn only beside records of this GPU."""
OTHERS_STEP_MS: dict[str, dict[str, dict[int, float]]] = {
    "smollm2-135m": {
        MEGATRON: {1: 1.76, 16: 1.79, 64: 2.03, 256: 2.77},
        VLLM: {1: 1.14, 16: 1.24, 64: 1.65, 256: 3.12},
        FLOOR: {1: 0.06, 16: 0.08, 64: 0.15, 256: 0.41},
    },
    "llama-3.1-8b": {
        MEGATRON: {1: 5.67, 64: 6.83},
        VLLM: {1: 4.92, 64: 6.09},
        FLOOR: {1: 3.50, 64: 3.99},
    },
}
"""Milliseconds a step by batch: steady decode, bfloat16, greedy, prompt 128, mean context 256. This
project's own measurements of those engines (November 2026, one NVIDIA H200), of each the faster of
two; the floor is weights and KV cache read once, at the bandwidth of a large copy."""
OTHERS_PROMPT_TOKENS = 128
OTHERS_ATTENTION_US: dict[str, dict[int, float]] = {
    "smollm2-135m": {1: 6.4, 16: 8.6, 64: 11.6, 256: 24.2},
    "llama-3.1-8b": {1: 8.4, 16: 10.7, 64: 30.1, 256: 87.3},
}
"""Microseconds a layer by batch at context 256: at each batch the fastest of FlashAttention-3,
flashinfer 0.6.12 and flash-attn-4; measured as above."""
OTHERS_STYLES = {MEGATRON: (VERMILION, "D"), VLLM: (PURPLE, "v"), FLOOR: (GREY, "")}

Row = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """All figures of one benchmark on one GPU."""

    rows: list[Row]
    gpu: str | None

    @property
    def beside_others(self) -> bool:
        """Whether the figures of others were measured on this GPU too."""
        return OTHERS_GPU in (self.gpu or "")

    def values(self, key: str) -> list[Any]:
        """The values of one key, each once, in ascending order; known models by size."""
        known = list(OTHERS_STEP_MS)
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
    chosen = [
        record
        for record in records
        if record["benchmark"] == benchmark
        and not record["settings"].get("temperature")
        and (benchmark != "decode" or record["settings"]["prompt_tokens"] == OTHERS_PROMPT_TOKENS)
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


# ---- Plots ---------------------------------------------------------------------------------------


def panels(count: int, rows: int = 1, height: float = 3.2, **options: Any) -> tuple[Figure, Any]:
    """A figure of `rows` times `count` axes, and its axes as a 2-D array."""
    return plt.subplots(
        rows, count, figsize=(max(4.2, 3.7 * count), height * rows), squeeze=False,
        layout="constrained", **options,
    )  # fmt: skip


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int = 3) -> None:
    """One legend for all axes, each name once."""
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False
    )


def batch_axis(axis: Axes, batches: Sequence[int], label: str = "batch size") -> None:
    """A logarithmic axis with a tick at each measured batch."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_xlabel(label)


def plot_step_time(figures: Figures) -> Figure:
    """Step time by batch: ours, its replay, other engines and the floor by bytes."""
    models = figures.values("model")
    figure, axes = panels(len(models))
    for axis, model in zip(axes[0], models, strict=True):
        batches = sorted({row["batch"] for row in figures.select(model=model)})
        if figures.beside_others:
            for name, values in OTHERS_STEP_MS.get(model, {}).items():
                shown = {b: v for b, v in values.items() if min(batches) <= b <= max(batches)}
                colour, marker = OTHERS_STYLES[name]
                style = "--" if name == FLOOR else "-"
                axis.plot(
                    list(shown), list(shown.values()), style, color=colour, marker=marker,
                    label=name,
                )  # fmt: skip
        for lookahead in figures.values("lookahead")[:2]:
            rows = sorted(
                figures.select(model=model, lookahead=lookahead), key=lambda row: row["batch"]
            )
            colour, marker = LOOKAHEAD_STYLES[lookahead % 4]
            axis.plot(
                [row["batch"] for row in rows], [row["step_ms"] for row in rows],
                color=colour, marker=marker, label=f"this engine, lookahead {lookahead}",
            )  # fmt: skip
        # Every lookahead replays the same step.
        replays = {
            row["batch"]: row["replay_ms"]
            for row in sorted(figures.select(model=model), key=lambda row: row["batch"])
            if row.get("replay_ms")
        }
        if replays:
            axis.plot(
                list(replays), list(replays.values()), ":", color=BLACK,
                label="its step, replayed back to back",
            )  # fmt: skip
        axis.set_title(model)
        axis.margins(y=0.1)
        axis.set_ylim(bottom=0)
        batch_axis(axis, batches)
    axes[0][0].set_ylabel("decode step, ms")
    legend_below(figure, axes[0], columns=2)
    return figure


def plot_lookahead(figures: Figures) -> Figure:
    """What launching ahead brings: step time over its replay (or over lookahead 0) by batch."""
    models = figures.values("model")
    has_replay = all(row.get("replay_ms") for row in figures.rows)
    figure, axes = panels(len(models), sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        rows = figures.select(model=model)
        batches = sorted({row["batch"] for row in rows})
        serial = {row["batch"]: row["step_ms"] for row in rows if row["lookahead"] == 0}
        lookaheads = figures.values("lookahead")
        for place, lookahead in enumerate(lookaheads):
            points = {}
            for row in figures.select(model=model, lookahead=lookahead):
                limit = row["replay_ms"] if has_replay else serial.get(row["batch"], math.nan)
                points[row["batch"]] = row["step_ms"] / limit
            shift = 0.16 * (place - (len(lookaheads) - 1) / 2)
            colour, marker = LOOKAHEAD_STYLES[lookahead % 4]
            axis.plot(
                [batches.index(batch) + shift for batch in points], list(points.values()),
                linestyle="none", color=colour, marker=marker, label=f"lookahead {lookahead}",
            )  # fmt: skip
        axis.axhline(1.0, color=BLACK, linewidth=0.8)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_xlim(-0.5, len(batches) - 0.5)
        axis.set_xlabel("batch size")
        axis.set_title(model)
    beside = "its replay" if has_replay else "lookahead 0"
    axes[0][0].set_ylabel(f"decode step over {beside}")
    legend_below(figure, axes[0])
    return figure


def plot_churn(figures: Figures) -> Figure:
    """Steps of steady decode and of churn, by lookahead; the dots are the slowest of 100."""
    cases = sorted({(row["model"], row["batch"]) for row in figures.rows})
    figure, axes = panels(len(cases))
    for axis, (model, batch) in zip(axes[0], cases, strict=True):
        rows = sorted(figures.select(model=model, batch=batch), key=lambda row: row["lookahead"])
        for place, (load, colour) in enumerate((("steady", SKY), ("churn", BLUE))):
            at = [i + 0.38 * (place - 0.5) for i in range(len(rows))]
            finishes = rows[0]["churn"]["finishes_per_step"]
            name = f"churn, requests ending and arriving in each step: {finishes:g}"
            axis.bar(
                at, [row[load]["step_ms"] for row in rows], 0.36, color=colour,
                label=name if load == "churn" else "steady decode",
            )  # fmt: skip
            axis.plot(
                at, [row[load]["step_p99_ms"] for row in rows], linestyle="none", marker="_",
                markersize=10, color=BLACK, label="99th percentile of single steps",
            )  # fmt: skip
        for i, row in enumerate(rows):
            axis.annotate(
                f"{row['churn_over_steady']:.2f} ×\nsteady", (i + 0.19, 0), (0, 4), ha="center",
                textcoords="offset points", color="white", fontsize=7,
            )  # fmt: skip
        axis.set_xticks(range(len(rows)), [str(row["lookahead"]) for row in rows])
        axis.set_xlabel("lookahead")
        axis.set_title(f"{model}, batch {batch}")
        axis.margins(y=0.12)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("step, ms")
    legend_below(figure, axes[0], columns=1)
    return figure


def plot_throughput(figures: Figures) -> Figure:
    """Percentiles of time to first token and of time per output token, by arrival rate."""
    metrics = {"ttft_ms": "time to first token, ms", "tpot_ms": "time per output token, ms"}
    percentiles = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
    figure, axes = panels(len(percentiles), rows=len(metrics), height=2.6, sharey="row")
    models = figures.values("model")
    for line, (metric, title) in zip(axes, metrics.items(), strict=True):
        for axis, (percentile, name) in zip(line, percentiles.items(), strict=True):
            for model in models:
                for lookahead in figures.values("lookahead"):
                    rows = figures.select(model=model, lookahead=lookahead)
                    rows = sorted(
                        (row for row in rows if row[metric][percentile] is not None),
                        key=lambda row: row["rate"],
                    )
                    colour, marker = LOOKAHEAD_STYLES[lookahead % 4]
                    label = f"lookahead {lookahead}"
                    axis.plot(
                        [row["rate"] for row in rows], [row[metric][percentile] for row in rows],
                        ("-", "--", ":")[models.index(model) % 3], color=colour, marker=marker,
                        label=label if len(models) == 1 else f"{model}, {label}",
                    )  # fmt: skip
            if metric == "ttft_ms":
                axis.set_title(name)
            else:
                axis.set_xlabel("arrivals, requests/s")
        line[0].set_ylabel(title)
        line[0].set_ylim(bottom=0)  # of the whole row, once all is drawn
    if len(models) == 1:
        figure.suptitle(models[0])
    legend_below(figure, axes.flat)
    return figure


def plot_decode_attention(figures: Figures) -> Figure:
    """Decode attention by batch and context, beside its bytes and the best kernel of others."""
    shapes = figures.values("shape")
    figure, axes = panels(len(shapes), sharey=True)
    for axis, shape in zip(axes[0], shapes, strict=True):
        lengths = sorted({row["length"] for row in figures.select(shape=shape)})
        colours = (BLUE, GREEN, ORANGE, PURPLE, SKY)
        for length, colour in zip(lengths, colours * len(lengths), strict=False):
            rows = sorted(figures.select(shape=shape, length=length), key=lambda row: row["rows"])
            sizes = [row["rows"] for row in rows]
            axis.plot(
                sizes, [row["us"] for row in rows], color=colour, marker="o",
                label=f"context {length}",
            )  # fmt: skip
            axis.plot(sizes, [row["floor_us"] for row in rows], "--", color=colour)
        batches = sorted({row["rows"] for row in figures.select(shape=shape)})
        if figures.beside_others and 256 in lengths:
            others = {b: v for b, v in OTHERS_ATTENTION_US.get(shape, {}).items() if b in batches}
            axis.plot(
                list(others), list(others.values()), linestyle="none", marker="x", color=VERMILION,
                label="context 256, best of FA3, FA4, flashinfer",
            )  # fmt: skip
        axis.plot([], [], "--", color=GREY, label=FLOOR)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(shape)
        batch_axis(axis, batches)
    axes[0][0].set_ylabel("one layer, µs")
    legend_below(figure, axes[0], columns=2)
    return figure


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
