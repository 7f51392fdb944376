"""The plots of docs/records: each a function from the figures of one benchmark to a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plot_records import Figures, by_batch, others

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
OTHERS_STYLES = {"vLLM": (VERMILION, "D"), "Megatron-Core": (PURPLE, "v"), "bytes": (GREY, "")}
"""By the first word of a name in `others.json`, the same in every plot."""


def panels(count: int, rows: int = 1, height: float = 3.2, **options: Any) -> tuple[Figure, Any]:
    """A figure of `rows` times `count` axes, and its axes as a 2-D array."""
    return plt.subplots(
        rows, count, figsize=(max(4.2, 3.7 * count), height * rows), squeeze=False,
        layout="constrained", **options,
    )  # fmt: skip


def legend_below(
    figure: Figure, axes: Iterable[Axes], columns: int = 3, note: str | None = None
) -> None:
    """One legend for all axes, each name once; a note of some lines above it."""
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False,
        title=note, title_fontsize="small",
    )  # fmt: skip


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
            found = others()["step_ms"]["by_model"].get(model, {})
            for name, values in found.items():
                shown = by_batch(values, batches)
                colour, marker = OTHERS_STYLES[name.split()[0]]
                style = "-" if marker else "--"
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


LATER_REPLAY = "Below 1: the replay is timed after the steps, when more tokens are cached."


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
    legend_below(figure, axes[0], note=LATER_REPLAY if has_replay else None)
    return figure


def plot_churn(figures: Figures) -> Figure:
    """Steps of steady decode and of churn, by lookahead; the dots are the slowest of 100."""
    order = figures.values("model")
    cases = sorted(
        {(row["model"], row["batch"]) for row in figures.rows},
        key=lambda case: (order.index(case[0]), case[1]),
    )
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


LATER_FIRST_TOKEN = (
    "With lookahead 1, one step more is in flight when a request arrives. So its first token comes "
    "up to one step later;\neach later token comes sooner, since the next step is launched early."
)
MOST_BESIDE_OURS = 4.0
"""Figures of others that are as many times ours are written into the plot instead of drawn: our
curves would lie flat at its bottom."""


def plot_throughput(figures: Figures) -> Figure:
    """Time to first token and time per output token by arrival rate: medians, and dashed the 99th
    percentiles. Each model has a column with axes of its own, since models of different sizes serve
    different rates."""
    metrics = {"ttft_ms": "time to first token, ms", "tpot_ms": "time per output token, ms"}
    models = figures.values("model")
    figure, axes = panels(len(models), rows=len(metrics), height=2.7, sharex="col")
    for line, (metric, title) in zip(axes, metrics.items(), strict=True):
        for axis, model in zip(line, models, strict=True):
            rates = sorted({row["rate"] for row in figures.select(model=model)})
            most = 0.0
            for lookahead in figures.values("lookahead"):
                rows = figures.select(model=model, lookahead=lookahead)
                found = {row["rate"]: row[metric] for row in rows}
                style = LOOKAHEAD_STYLES[lookahead % 4]
                most = max(most, _plot_percentiles(axis, found, f"lookahead {lookahead}", style))
            if figures.beside_others:
                _plot_others(axis, model, metric, rates, MOST_BESIDE_OURS * most)
            axis.set_ylim(bottom=0)
            axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axis.margins(x=0.12)
            if metric == "ttft_ms":
                axis.set_title(model)
            else:
                axis.set_xlabel("arrivals, requests/s")
        line[0].set_ylabel(title)
    notes = [LATER_FIRST_TOKEN] if len(figures.values("lookahead")) > 1 else []
    if figures.beside_others:
        notes.append(others()["serving"]["note"])
    legend_below(figure, axes.flat, columns=3, note="\n".join(notes))
    return figure


def _plot_percentiles(
    axis: Axes, by_rate: dict[float, dict[str, float | None]], name: str, style: tuple[str, str]
) -> float:
    """Draw medians and 99th percentiles; return the highest of them."""
    colour, marker = style
    most = 0.0
    for percentile, dashes, words in (("p50", "-", "median"), ("p99", "--", "99 %")):
        points = {rate: value for rate in sorted(by_rate) if (value := by_rate[rate][percentile])}
        axis.plot(
            list(points), list(points.values()), dashes, color=colour, marker=marker,
            label=f"{name}, {words}",
        )  # fmt: skip
        most = max(most, *points.values()) if points else most
    return most


def _plot_others(axis: Axes, model: str, metric: str, rates: Sequence[float], limit: float) -> None:
    """Draw other engines' figures at our rates; write down those above the limit."""
    engines = others()["serving"]["by_model"].get(model, {})
    for name, by_rate in engines.items():
        short, style = name.split(",")[0], OTHERS_STYLES[name.split()[0]]
        found = {rate: by_rate[f"{rate:g}"][metric] for rate in rates if f"{rate:g}" in by_rate}
        drawn = {rate: value for rate, value in found.items() if value["p99"] <= limit}
        if drawn:
            _plot_percentiles(axis, drawn, short, style)
        for rate in found.keys() - drawn.keys():
            median, late = found[rate]["p50"], found[rate]["p99"]
            axis.annotate(
                f"{short} at {rate:g}/s: {median:,g}, 99 %: {late:,g}\n(saturated, not drawn)",
                (0.97, 0.05), xycoords="axes fraction", ha="right", fontsize="small",
                color=style[0],
            )  # fmt: skip


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
            best = others()["attention_us"]
            shown = by_batch(best["by_model"].get(shape, {}), batches)
            axis.plot(
                list(shown), list(shown.values()), linestyle="none", marker="x", color=VERMILION,
                label=best["name"],
            )  # fmt: skip
        axis.plot([], [], "--", color=GREY, label="bytes over 4.3 TB/s")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(shape)
        batch_axis(axis, batches)
    axes[0][0].set_ylabel("one layer, µs")
    legend_below(figure, axes[0], columns=2)
    return figure
