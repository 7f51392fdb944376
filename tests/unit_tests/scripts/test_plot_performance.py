"""Plots show the newest figures, never of two machines at once, and repeat bit for bit."""

import itertools
import json

import performance_plots
import plot_performance
import pytest
from plot_records import Figures, collect, others, read_records

H200 = "NVIDIA H200"
VLLM = "vLLM 0.24.0, async scheduling"


def write(folder, name, benchmark, figures, gpu=H200, date="2026-01-01", **settings):
    record = {"benchmark": benchmark, "date": date, "gpu": gpu, "figures": figures}
    record["settings"] = {"prompt_tokens": 128} | settings
    (folder / name).write_text(json.dumps(record))


def decode_rows(step_ms, replay=True):
    return [
        {"model": "dummy:smollm2-135m", "batch": batch, "lookahead": lookahead, "step_ms": step_ms}
        | ({"replay_ms": 1.0} if replay else {})
        for batch, lookahead in itertools.product((1, 64), (0, 1))
    ]


def all_records(folder):
    write(folder, "decode.json", "decode", decode_rows(1.5))
    load = {"step_ms": 2.0, "step_p99_ms": 3.0, "finishes_per_step": 1.0}
    row = {"model": "dummy:tiny", "batch": 8, "churn_over_steady": 1.0}
    write(
        folder, "churn.json", "churn",
        [row | {"lookahead": k, "churn": load, "steady": load} for k in range(3)],
    )  # fmt: skip
    spread = {"p50": 1.0, "p90": 2.0, "p99": 30.0}
    write(
        folder, "throughput.json", "throughput",
        [
            {"model": "m", "rate": rate, "lookahead": k, "ttft_ms": spread, "tpot_ms": spread}
            for rate in (1.0, 4.0) for k in range(3)
        ],
    )  # fmt: skip
    write(
        folder, "attention.json", "decode_attention",
        [
            {"shape": "llama-3.1-8b", "rows": rows, "length": length, "us": 9.0, "floor_us": 4.0}
            for rows in (1, 16) for length in (256, 2048)
        ],
    )  # fmt: skip
    (folder / "notes.json").write_text("[1, 2]")  # not a record


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_every_plot_is_drawn_and_equal_records_give_equal_files(tmp_path, capsys):
    all_records(tmp_path)
    for output in ("first", "second"):
        plot_performance.main(["--records", str(tmp_path), "--output", str(tmp_path / output)])
    names = {f"{name}.svg" for name in plot_performance.PLOTS}
    assert {path.name for path in (tmp_path / "first").iterdir()} == names
    for name in names:
        first = (tmp_path / "first" / name).read_bytes()
        assert len(first) > 5000
        assert first == (tmp_path / "second" / name).read_bytes()
    assert str(tmp_path / "first" / "churn.svg") in capsys.readouterr().out


def test_the_newest_greedy_figures_count(tmp_path):
    write(tmp_path, "c_hot.json", "decode", decode_rows(9.0), date="2026-04-01", temperature=0.8)
    write(
        tmp_path, "d_long.json", "decode", decode_rows(7.0), date="2026-05-01", prompt_tokens=32640
    )
    write(tmp_path, "a_new.json", "decode", decode_rows(1.0)[:1], date="2026-03-01")
    write(tmp_path, "b_old.json", "decode", decode_rows(5.0), date="2026-02-01")
    figures = collect(read_records(tmp_path), "decode", ("model", "batch", "lookahead"))
    assert [row["step_ms"] for row in figures.rows] == [1.0, 5.0, 5.0, 5.0]
    assert figures.values("model") == ["smollm2-135m"]


def test_two_machines_are_not_mixed(tmp_path):
    write(tmp_path, "gpu.json", "decode", decode_rows(1.0))
    write(tmp_path, "cpu.json", "decode", decode_rows(50.0), gpu=None)
    with pytest.raises(ValueError, match=r"must not mix machines: cpu.json \(None\), gpu.json"):
        plot_performance.main(["--records", str(tmp_path)])


def test_other_engines_are_shown_beside_the_same_gpu_only():
    beside = performance_plots.plot_step_time(Figures(decode_rows_short(1.0), H200))
    alone = performance_plots.plot_step_time(Figures(decode_rows_short(1.0), None))
    assert VLLM in labels(beside)
    assert "bytes over 4.3 TB/s" in labels(beside)
    assert VLLM not in labels(alone)
    assert "this engine, lookahead 1" in labels(alone)


def test_lookahead_is_shown_over_replay_or_over_serial():
    def heights(replay):
        rows = decode_rows_short(1.5, replay)
        for row in rows:
            row["step_ms"] -= 0.3 * row["lookahead"]
        axis = performance_plots.plot_lookahead(Figures(rows, H200)).axes[0]
        series = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
        return series["lookahead 0"], series["lookahead 1"], axis.get_ylabel()

    assert heights(True) == ([1.5, 1.5], [1.2, 1.2], "decode step over its replay")
    assert heights(False) == (
        [1.0, 1.0], pytest.approx([0.8, 0.8]), "decode step over lookahead 0"
    )  # fmt: skip


def decode_rows_short(step_ms, replay=True):
    return [row | {"model": "smollm2-135m"} for row in decode_rows(step_ms, replay)]


def test_an_empty_folder_says_what_to_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot_performance.main(["--records", str(tmp_path)])
    assert "run a benchmark with --json" in capsys.readouterr().err


def test_figures_of_others_say_where_they_are_from():
    for metric in ("step_ms", "serving", "attention_us"):
        assert others()[metric]["source"]
        assert others()[metric]["by_model"]


def throughput_figures(gpu, lookaheads=(0, 1), scale=1.0):
    rates = {"smollm2-135m": (64.0, 256.0), "llama-3.1-8b": (16.0, 48.0)}
    spread = {"p50": 20.0 * scale, "p99": 50.0 * scale}
    rows = [
        {"model": model, "rate": rate, "lookahead": lookahead, "ttft_ms": spread, "tpot_ms": spread}
        for model, those in rates.items() for rate in those for lookahead in lookaheads
    ]  # fmt: skip
    return Figures(rows, gpu)


def test_models_of_different_rates_have_axes_of_their_own():
    figure = performance_plots.plot_throughput(throughput_figures(None))
    ticks = [[t.get_text() for t in axis.get_xticklabels()] for axis in figure.axes[2:]]
    assert ticks == [["64", "256"], ["16", "48"]]
    assert not any("vLLM" in label for label in labels(figure))


def test_the_picture_says_why_lookahead_1_has_a_later_first_token():
    def note(figures):
        return performance_plots.plot_throughput(figures).legends[0].get_title().get_text()

    assert "up to one step later" in note(throughput_figures(None))
    assert note(throughput_figures(None, lookaheads=(1,))) == ""
    assert "vLLM: another day" in note(throughput_figures(H200))


def test_a_saturated_engine_is_written_down_and_squeezes_no_curve():
    figure = performance_plots.plot_throughput(throughput_figures(H200, scale=0.1))
    small, large = figure.axes[:2]
    assert small.get_ylim()[1] < 6
    (text,) = small.texts
    assert text.get_text().startswith("vLLM 0.24.0 at 256/s: 567, 99 %: 3,146")
    assert large.texts, "114.8 is more than 4 times our 5"
    figure = performance_plots.plot_throughput(throughput_figures(H200))
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[1].lines}
    assert drawn["vLLM 0.24.0, median"] == [24.0, 40.2]
    assert drawn["vLLM 0.24.0, 99 %"] == [72.5, 114.8]
