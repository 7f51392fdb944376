"""Prometheus metrics, scraped over HTTP as Prometheus does."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_async import LLM, SamplingParams
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import ConfigurationError
from megatron_async.observe.metrics import EngineCollector, serve_metrics
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
