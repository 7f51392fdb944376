"""The service's numbers under the names of vLLM, for boards and autoscalers that know those.

Names and labels are those of the Grafana boards in vLLM 0.25's examples/observability. What a
service of ours cannot tell honestly is left out: `vllm:iteration_tokens_total`, the parameters of
requests, `cache_config_info`. A request here is one sequence: a call with n=3 counts as three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from megatron_async.serving.load_lines import running_and_waiting
from megatron_async.serving.service_counters import cumulative

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
"""Counters of each engine: vLLM's name -> that of `engine.stats()`."""


def vllm_metrics(stats: Mapping[str, Any], model_name: str) -> Iterator[Metric]:
    """The metrics of one answer to "stats".

    Args:
        stats: of the coordinator.
        model_name: value of the label of that name.
    """
    engines = {name: replica["engine"] for name, replica in stats["replicas"].items()}
    running, waiting = running_and_waiting(stats)
    for name, text, value in (
        ("num_requests_running", "Requests that hold a slot.", running),
        ("num_requests_waiting", "Requests without one.", waiting),
    ):
        gauge = GaugeMetricFamily("vllm:" + name, text, labels=["model_name"])
        gauge.add_metric([model_name], float(value))
        yield gauge
    yield from _by_engine(engines, model_name)
    if (service := stats.get("service")) is not None:
        yield from _of_requests(service, model_name)


def _by_engine(engines: Mapping[str, Mapping[str, float]], model_name: str) -> Iterator[Metric]:
    labels = ["model_name", "engine"]
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=labels
    )
    for name, engine in engines.items():
        if engine.get("kv_blocks"):
            usage.add_metric([model_name, name], engine["kv_blocks_in_use"] / engine["kv_blocks"])
    yield usage
    for theirs, ours in OF_ENGINES.items():
        counter = CounterMetricFamily("vllm:" + theirs, f"{ours} of an engine.", labels=labels)
        for name, engine in engines.items():
            if ours in engine:
                counter.add_metric([model_name, name], engine[ours])
        yield counter


def _of_requests(service: Mapping[str, Any], model_name: str) -> Iterator[Metric]:
    for name, key, text in (
        ("prompt_tokens", "prompt_tokens", "Tokens of prompts."),
        ("generation_tokens", "generated_tokens", "Tokens generated."),
    ):
        counter = CounterMetricFamily("vllm:" + name, text, labels=["model_name"])
        counter.add_metric([model_name], service[key])
        yield counter
    success = CounterMetricFamily(
        "vllm:request_success", "Requests that ended, by why.",
        labels=["model_name", "finished_reason"],
    )  # fmt: skip
    for theirs, ours in FINISHED.items():
        count = sum(service["reasons"].get(reason, 0) for reason in ours)
        success.add_metric([model_name, theirs], count)
    yield success
    for theirs, key in HISTOGRAMS.items():
        values = service["histograms"][key]
        histogram = HistogramMetricFamily("vllm:" + theirs, key, labels=["model_name"])
        histogram.add_metric([model_name], cumulative(key, values["counts"]), values["sum"])
        yield histogram
