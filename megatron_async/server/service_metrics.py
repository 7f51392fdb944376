"""`/metrics`: the service's numbers as Prometheus reads them.

Beside our own names stand those of vLLM's boards, where `--metrics-names vllm` asks for them. All
numbers are the coordinator's, so every API process tells the same. Labels have values from the
configuration (names of replicas, of the model) or from fixed lists: nothing of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from megatron_async.observe.metrics import COUNTERS, GAUGES, PREFIX
from megatron_async.serving.service_counters import cumulative, labelled, running_and_waiting

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("loading", "running", "draining", "paused", "sleeping", "restarting", "dead")

HISTOGRAM_HELP = {
    "ttft_seconds": "From a request's arrival to its first token.",
    "inter_token_seconds": "Between tokens; those of one request count as their mean.",
    "e2e_seconds": "From a request's arrival to its end.",
    "queue_seconds": "From a request's arrival to its slot.",
    "prefill_seconds": "From a request's slot to its first token.",
    "decode_seconds": "From a request's first token to its end.",
    "inference_seconds": "From a request's slot to its end.",
    "prompt_tokens": "Tokens of a request's prompt.",
    "generated_tokens": "Tokens that a request generated.",
}
OUTCOMES = ("received", "completed", "failed", "aborted", "retried", "moved", "refused")


class ServiceCollector(Collector):
    """Metrics of one answer to "stats". What an older coordinator does not tell is left out. With
    names "vllm", those of vLLM beside our "own"."""

    def __init__(self, stats: Mapping[str, Any], names: str, model_name: str) -> None:
        self._stats = stats
        self._names = names
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        yield from _of_service(self._stats)
        yield from _of_engines(self._stats)
        if self._names == "vllm":
            yield from vllm_metrics(self._stats, self._model_name)


def metrics_text(stats: Mapping[str, Any], names: str, model_name: str) -> bytes:
    """The answer of `/metrics`, of content type `CONTENT_TYPE`. `names`: "own", or "vllm" for the
    names of vLLM's boards beside them; `model_name` is the label of these, from the configuration.
    """
    return generate_latest(ServiceCollector(stats, names, model_name))


def _of_service(stats: Mapping[str, Any]) -> Iterator[Metric]:
    yield labelled(
        GaugeMetricFamily, PREFIX + "state", "1 for the state that the service is in.", ["state"],
        [([name], float(stats.get("state") == name)) for name in STATES],
    )  # fmt: skip
    yield labelled(
        CounterMetricFamily, PREFIX + "service_requests", "What became of requests.", ["outcome"],
        [([outcome], stats.get(f"{outcome}_requests", 0)) for outcome in OUTCOMES],
    )  # fmt: skip
    yield GaugeMetricFamily(
        PREFIX + "unfinished_requests", "Requests queued or served.", stats["unfinished_requests"]
    )
    if "unfinished_tokens" in stats:
        yield GaugeMetricFamily(
            PREFIX + "unfinished_tokens",
            "Tokens that they may take, prompts and answers.",
            stats["unfinished_tokens"],
        )
    yield GaugeMetricFamily(PREFIX + "clients", "Clients of the coordinator.", stats["clients"])
    service = stats.get("service")
    if service is None:
        return
    yield labelled(
        CounterMetricFamily, PREFIX + "ended_requests", "Requests that ended, by why.", ["reason"],
        [([reason], count) for reason, count in service["reasons"].items()],
    )  # fmt: skip
    for key, text in (
        ("prompt_tokens", "Tokens of the prompts of requests that ended."),
        ("cached_tokens", "Of these, tokens that were found in a prefix cache."),
        ("generated_tokens", "Tokens that went to clients."),
    ):
        yield CounterMetricFamily(PREFIX + "service_" + key, text, service[key])
    for name, text in HISTOGRAM_HELP.items():
        values = service["histograms"][name]
        histogram = HistogramMetricFamily(PREFIX + "request_" + name, text)
        histogram.add_metric([], cumulative(name, values["counts"]), values["sum"])
        yield histogram


def _of_engines(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Sums of gauges, and counters by replica: a sum of counters would fall with each replica that
    is gone, and a fall is a restart to Prometheus."""
    engines = {name: replica["engine"] for name, replica in stats["replicas"].items()}
    for name, text in GAUGES.items():
        values = [engine[name] for engine in engines.values() if name in engine]
        total = max(values, default=0) if name == "lookahead" else sum(values)
        if name == "waiting_requests":  # those that no replica has wait too
            total += stats["queued_requests"]
        yield GaugeMetricFamily(PREFIX + name, text, total)
    for name, text in COUNTERS.items():
        told = [([replica], engine[name]) for replica, engine in engines.items() if name in engine]
        yield labelled(CounterMetricFamily, PREFIX + name, text, ["replica"], told)
    up = [([replica], 1.0) for replica in engines]
    about = PREFIX + "replica_up", "1 for each replica.", ["replica"]
    yield labelled(GaugeMetricFamily, *about, up)


FINISHED = {
    "stop": ("termination_id", "stop_token", "stop_word", "grammar"),
    "length": ("length",),
    "abort": ("aborted",),
    "error": ("error",),
}
"""vLLM's word for why a request ended -> ours."""

HISTOGRAMS = {
    "time_to_first_token_seconds": "ttft_seconds",
    "inter_token_latency_seconds": "inter_token_seconds",
    "e2e_request_latency_seconds": "e2e_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_inference_time_seconds": "inference_seconds",
    "request_prompt_tokens": "prompt_tokens",
    "request_generation_tokens": "generated_tokens",
    "request_max_num_generation_tokens": "generated_tokens",
}
"""vLLM's name -> ours."""

OF_ENGINES = {
    "num_preemptions": "evictions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
}
"""Counters of each engine: vLLM's name -> name in `engine.stats()`."""


def vllm_metrics(stats: Mapping[str, Any], model_name: str) -> Iterator[Metric]:
    """The metrics of one answer to "stats"."""
    engines = {name: replica["engine"] for name, replica in stats["replicas"].items()}
    running, waiting = running_and_waiting(stats)
    for name, text, value in (
        ("num_requests_running", "Requests that hold a slot.", running),
        ("num_requests_waiting", "Requests without one.", waiting),
    ):
        own = [([model_name], float(value))]
        yield labelled(GaugeMetricFamily, "vllm:" + name, text, ["model_name"], own)
    yield from _by_engine(engines, model_name)
    if (service := stats.get("service")) is not None:
        yield from _of_requests(service, model_name)


def _by_engine(engines: Mapping[str, Mapping[str, float]], model_name: str) -> Iterator[Metric]:
    labels = ["model_name", "engine"]
    yield labelled(
        GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels,
        [
            ([model_name, name], engine["kv_blocks_in_use"] / engine["kv_blocks"])
            for name, engine in engines.items()
            if engine.get("kv_blocks")
        ],
    )  # fmt: skip
    for theirs, ours in OF_ENGINES.items():
        told = [([model_name, name], of[ours]) for name, of in engines.items() if ours in of]
        text = f"{ours} of an engine."
        yield labelled(CounterMetricFamily, "vllm:" + theirs, text, labels, told)


def _of_requests(service: Mapping[str, Any], model_name: str) -> Iterator[Metric]:
    for name, key, text in (
        ("prompt_tokens", "prompt_tokens", "Tokens of prompts."),
        ("generation_tokens", "generated_tokens", "Tokens generated."),
    ):
        own = [([model_name], service[key])]
        yield labelled(CounterMetricFamily, "vllm:" + name, text, ["model_name"], own)
    yield labelled(
        CounterMetricFamily, "vllm:request_success", "Requests that ended, by why.",
        ["model_name", "finished_reason"],
        [
            ([model_name, theirs], sum(service["reasons"].get(reason, 0) for reason in ours))
            for theirs, ours in FINISHED.items()
        ],
    )  # fmt: skip
    for theirs, key in HISTOGRAMS.items():
        values = service["histograms"][key]
        histogram = HistogramMetricFamily("vllm:" + theirs, key, labels=["model_name"])
        histogram.add_metric([model_name], cumulative(key, values["counts"]), values["sum"])
        yield histogram
