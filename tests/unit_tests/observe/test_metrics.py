"""Metrics, lines of log, named ranges and the timeline file."""

import json
import logging
import re
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from megatron_async import LLM, SamplingParams
from megatron_async.devices import CpuDevice
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import ConfigurationError
from megatron_async.observe.log_lines import LineFormatter, said_line
from megatron_async.observe.metrics import EngineCollector, serve_metrics
from megatron_async.observe.timeline import Span, Timeline
from megatron_async.observe.tracer import Tracer
from megatron_async.serving.service_counters import LOAD_EVERY_S, LoadLines
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def engine():
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=8, block_size_tokens=16) as llm:
        yield llm.engine


def scrape(server):
    """Samples by (name, labels)."""
    url = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("megatron_async_"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_says_what_the_engine_says(engine):
    with serve_metrics(engine, 0) as server:
        before = scrape(server)
        assert before["steps_total", ()] == before["generated_tokens_total", ()] == 0
        greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=9, termination_id=-1)
        engine.add_request(99, [1, 2], greedy)
        engine.abort_request(99)
        engine.generate([[1, 2, 3], [4], [-1]], greedy)
        found, stats = scrape(server), engine.stats()
    for name in ("steps", "overlapped_steps", "generated_tokens", "prefill_tokens", "rows"):
        assert found[f"{name}_total", ()] == stats[name] > 0
    for name in ("kv_blocks", "kv_blocks_in_use_peak", "slots_in_use_peak", "slots", "lookahead"):
        assert found[name, ()] == stats[name] > 0
    assert found["steps_in_flight", ()] == found["waiting_requests", ()] == 0
    outcomes = {k[1][0]: v for k, v in found.items() if k[0] == "requests_total"}
    assert outcomes == {"completed": 2, "failed": 1, "aborted": 1}
    reasons = {k[1][0]: v for k, v in found.items() if k[0] == "no_overlap_steps_total"}
    assert reasons["after_idle"] == 1
    assert sum(reasons.values()) + found["overlapped_steps_total", ()] == stats["steps"]


def test_drafts_by_position_and_by_reason():
    speculation = {"speculative_method": "ngram", "num_speculative_tokens": 2}
    pool = {"num_kv_blocks": 8, "block_size_tokens": 16}
    repeating = SamplingParams(
        num_tokens_to_generate=30, termination_id=-1, logit_bias={3: 100.0}, temperature=0.0
    )
    with (
        LLM("dummy:tiny", device="cpu", **pool, **speculation) as llm,
        serve_metrics(llm.engine, 0) as server,
    ):
        llm.generate([[1, 2, 3]], repeating)
        found, stats = scrape(server), llm.engine.stats()
    fewer = {k[1][0]: v for k, v in found.items() if k[0] == "fewer_drafts_rows_total"}
    assert {f"fewer_drafts_{reason}": rows for reason, rows in fewer.items()} == {
        name: value for name, value in stats.items() if name.startswith("fewer_drafts_")
    }
    assert fewer["nothing_found"] > 0
    for name in ("drafted_tokens", "accepted_tokens"):
        for place in ("1", "2"):
            assert found[f"{name}_total", (place,)] == stats[f"{name}_at_{place}"] > 5


@pytest.mark.parametrize("lookahead", [0, 2])
def test_ends_in_rows_that_verified_drafts(lookahead):
    """Every draft is right here: a request whose last row gave two tokens or more ended among
    drafts, and one whose last row gave a single token had none left to verify."""

    class LastRows(EngineListener):
        def __init__(self):
            self.sizes = {}

        def booked(self, output):
            for row, request in enumerate(output.request_ids.tolist()):
                self.sizes[request] = len(output.tokens_of(row))

    settings = {"num_kv_blocks": 32, "block_size_tokens": 16, "lookahead": lookahead}
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 2}
    with LLM("dummy:tiny", device="cpu", **settings, **drafts) as llm:
        llm.engine.listeners.append(rows := LastRows())
        for tokens in (1, *range(20, 28)):
            always = SamplingParams(
                temperature=0.0, num_tokens_to_generate=tokens, termination_id=-1,
                logit_bias={3: 100.0},
            )  # fmt: skip
            llm.engine.add_request(tokens, [1, 2, 3], always)
        while llm.engine.has_unfinished_requests():
            llm.engine.step_modern()
        stats, metrics = llm.engine.stats(), list(EngineCollector(llm.engine).collect())
    wanted = sum(size > 1 for size in rows.sizes.values())
    assert stats["finished_in_drafted_rows"] == wanted
    assert 0 < wanted < stats["finished_requests"] == 9
    name = "megatron_async_finished_in_drafted_rows"
    assert [m.samples[0].value for m in metrics if m.name == name] == [wanted]


def test_histograms_are_cumulative_and_in_seconds(engine):
    with serve_metrics(engine, 0) as server:
        engine.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=5))
        found, statistics = scrape(server), engine.statistics
    for stage in ("prepare", "launch", "resolve"):
        buckets = [
            (float(labels[0]), value)
            for (name, labels), value in found.items()
            if name == "stage_cpu_seconds_bucket" and labels[1] == stage
        ]
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        times = getattr(statistics, f"{stage}_times")
        assert buckets[-1] == (float("inf"), times.count)
        assert found["stage_cpu_seconds_count", (stage,)] == times.count > 0
        total = found["stage_cpu_seconds_sum", (stage,)]
        assert total == pytest.approx(getattr(statistics, f"{stage}_ns") / 1e9)
        # The bounds really bound: all that is counted up to one of them takes no longer.
        mean = total / times.count
        assert buckets[0][0] < mean < next(bound for bound, n in buckets if n == times.count)
    assert found["step_seconds_count", ()] == statistics.step_times.count


def test_a_taken_port_is_named(engine):
    with (
        serve_metrics(engine, 0) as server,
        pytest.raises(ConfigurationError, match=f"127.0.0.1:{server.port} .*choose a free port"),
    ):
        serve_metrics(engine, server.port)
    with pytest.raises(ConfigurationError, match=r":70000 .*1 to 65535"):
        serve_metrics(engine, 70000)
    serve_metrics(engine, server.port).close()  # free again


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def test_ranges_of_host_and_streams_go_to_their_lanes(device, tmp_path):
    timeline = Timeline()
    tracer = Tracer(device, timeline)

    def work(name):
        with tracer.range(name, 3):
            pass

    with tracer.range("step", 3), tracer.range("prepare_step", 3):
        pass
    device.compute.launch(lambda: work("forward_pass"))
    device.copy.launch(lambda: work("transfer_samples_to_cpu"))
    device.close()
    lanes = {span.name: span.lane for span in timeline.spans}
    assert lanes == {
        "step": "cpu",
        "prepare_step": "cpu",
        "forward_pass": "device",
        "transfer_samples_to_cpu": "copy",
    }
    outer, inner = timeline.select("cpu", "step")[3], timeline.select("cpu", "prepare_step")[3]
    assert outer.start_us <= inner.start_us <= inner.end_us <= outer.end_us

    timeline.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"cpu", "device", "copy"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 4
    assert min(e["ts"] for e in spans) == 0
    assert all(e["args"]["step"] == 3 for e in spans)


def test_without_a_timeline_a_range_is_shared_and_records_nothing(device):
    tracer = Tracer(device)
    assert tracer.range("a") is tracer.range("b", 5)


def test_ranges_are_nvtx_ranges_where_that_is_asked_for_also_when_the_stage_fails(
    device, monkeypatch
):
    """NVTX itself tells nobody what was pushed unless a profiler is attached."""
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    tracer = Tracer(device)
    plan = SimpleNamespace(step=3, kind="Decode", num_rows=2)
    with tracer.range("emit", 3), tracer.planning(3), tracer.call(3), tracer.of_step(plan):
        pass
    with tracer.awaited("resolve", plan):
        pass
    assert calls == []
    tracer = Tracer(device, nvtx=True)
    with pytest.raises(ZeroDivisionError), tracer.planning(3), tracer.range("emit", 3):
        _ = 1 // 0
    assert calls == ["Plan step 3", "emit", "pop", "pop"]
    calls.clear()
    with tracer.planning(3), tracer.planning(3), tracer.planning(4), tracer.planning(3):
        pass
    assert calls == [f"Plan step {step}" for step in (3, 4, 3)] + ["pop"] * 3


def test_waits_of_coroutines_that_end_in_any_order_leave_the_threads_ranges_nested(
    device, monkeypatch
):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_start", lambda text: calls.append(f"start {text}") or 7
    )
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda _: calls.append("end"))
    plan = SimpleNamespace(step=3, kind="Decode", num_rows=2)
    waits = [Tracer(device, nvtx=True).awaited("resolve", plan) for _ in range(2)]
    waits[0].__enter__()
    waits[1].__enter__()
    waits[0].__exit__()
    waits[1].__exit__()
    with Tracer(device, nvtx=True).awaited("resolve", plan):
        pass
    pushed = ["Decode step 3 rows 2", "resolve"]
    assert calls == [*pushed, "start resolve", "pop", "pop", "end", *pushed, "pop", "pop"]


def test_a_full_timeline_counts_what_it_drops(monkeypatch):
    monkeypatch.setattr("megatron_async.observe.timeline.MAX_SPANS", 2)
    timeline = Timeline()
    for i in range(5):
        timeline.add(Span("cpu", "step", i, i, i + 1))
    assert (len(timeline.spans), timeline.dropped) == (2, 3)


FORM = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w -]+: [^\n]*")


def line(text: str, error: BaseException | None = None, thread: str = "MainThread") -> str:
    given = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "said: %s", (text,), given)
    record.threadName = thread
    return LineFormatter("api-0").format(record)


@pytest.mark.parametrize(
    "text", ["plain", "a\nb", "\r\x1b[2J", "\x00\x85\u2028\u2029", "ü 漢 \U0001f642"]
)
def test_a_text_is_one_line(text: str) -> None:
    found = line(text)
    assert FORM.fullmatch(found)
    assert len(found.splitlines()) == 1
    assert " WARNING api-0: said: " in found
    assert found.isprintable()
    if text.isprintable():
        assert found.endswith(text)


def test_a_traceback_cannot_be_taken_for_a_line() -> None:
    try:
        raise ValueError("\x1b[2J\u2028bad\n2026-01-01 00:00:00,000 INFO api-0: all is well")
    except ValueError as error:
        first, *rest = line("x", error).split("\n")
    assert FORM.fullmatch(first)
    assert len(rest) >= 4
    assert all(one.startswith("    ") and one.isprintable() for one in rest)


def test_a_coordinator_in_a_thread_has_its_name() -> None:
    assert " WARNING coordinator: " in line("x", thread="coordinator")


def test_what_is_said_to_people_has_the_same_first_line() -> None:
    first, *rest = said_line("supervisor", "ready; try:\n  curl \\\n    x").split("\n")
    assert FORM.fullmatch(first)
    assert rest == ["  curl \\", "    x"]


def test_load_is_told_every_ten_seconds_while_there_is_any() -> None:
    def stats(unfinished: int, prompts: int, generated: int) -> dict[str, object]:
        engine = {"slots": 4, "waiting_requests": 1, "kv_blocks": 8, "kv_blocks_in_use": 2}
        replica = {"engine": engine, "unfinished_requests": unfinished}
        service = {"prompt_tokens": prompts, "generated_tokens": generated}
        return {"queued_requests": 0, "replicas": {"a": replica}, "service": service}

    lines = LoadLines(0.0)
    assert lines.line(stats(3, 0, 50), LOAD_EVERY_S - 0.1) == ""
    told = lines.line(stats(3, 20, 100), LOAD_EVERY_S)
    assert told.startswith("Load: 2 running, 1 waiting; 10.0 tokens/s generated, 2.0 prompt tok")
    assert told.endswith(" 2 of 8 KV blocks in use (25.0 %).")
    assert lines.line(stats(3, 20, 110), 1.5 * LOAD_EVERY_S) == ""
    told = lines.line(stats(0, 20, 110), 2 * LOAD_EVERY_S)
    assert told.startswith("Load: 0 running, 0 waiting; 1.0 tokens/s generated")
    assert lines.line(stats(0, 20, 110), 3 * LOAD_EVERY_S) == ""  # nothing happens
