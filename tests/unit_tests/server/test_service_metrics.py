"""What `/metrics` says of a service, by our names and by vLLM's."""

import subprocess
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from megatron_async.server.service_metrics import metrics_text
from megatron_async.serving.messages import Ended
from megatron_async.serving.service_counters import ServiceCounters

BOARDS = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_bucket", "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
)  # fmt: skip
"""Names on the Grafana boards that vLLM 0.25 ships, and in its own test of metrics."""


def engine(**changes: float) -> dict[str, Any]:
    figures = {
        "slots": 8, "slots_in_use": 3, "waiting_requests": 2, "kv_blocks": 10, "lookahead": 1,
        "kv_blocks_in_use": 4, "steps": 100, "evictions": 1, "prefix_cache_queries": 50,
        "prefix_cache_hits": 20,
    }  # fmt: skip
    unfinished = changes.pop("unfinished", figures["slots_in_use"] + figures["waiting_requests"])
    return {"engine": {**figures, **changes}, "unfinished_requests": unfinished}


def stats(**changes: Any) -> dict[str, Any]:
    counters = ServiceCounters()
    counters.generated(9)
    tokens = {"num_prompt_tokens": 5, "num_generated_tokens": 9}
    counters.ended(Ended(0, "stop_word", **tokens, ttft=0.03, latency=0.83))
    outcomes = ("received", "completed", "failed", "aborted", "retried", "refused")
    return {
        **{f"{outcome}_requests": 1 for outcome in outcomes},
        "state": "running", "unfinished_requests": 6, "queued_requests": 1, "clients": 2,
        "replicas": {"replica-0": engine(), "replica-1": engine(slots_in_use=5, unfinished=7)},
        "service": counters.as_dict(), **changes,
    }  # fmt: skip


def samples(told: dict[str, Any], names: str = "own") -> dict[tuple[str, ...], float]:
    """Values by name and values of labels, in the order of their names."""
    text = metrics_text(told, names, "tiny").decode()
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gauges_are_sums_and_counters_are_by_replica() -> None:
    found = samples(stats())
    assert found["megatron_async_slots_in_use",] == 8
    assert found["megatron_async_waiting_requests",] == 2 + 2 + 1
    assert found["megatron_async_lookahead",] == 1
    assert found["megatron_async_steps_total", "replica-1"] == 100
    assert found["megatron_async_state", "running"] == 1
    assert found["megatron_async_state", "draining"] == 0
    assert found["megatron_async_ended_requests_total", "stop_word"] == 1
    assert found["megatron_async_service_generated_tokens_total",] == 9
    assert found["megatron_async_request_ttft_seconds_bucket", "0.02"] == 0
    assert found["megatron_async_request_ttft_seconds_bucket", "0.05"] == 1
    assert found["megatron_async_request_inter_token_seconds_count",] == 8
    assert not any(name[0].startswith("vllm") for name in found)


def test_boards_of_vllm_find_their_names() -> None:
    found = samples(stats(), "vllm")
    assert {name[0] for name in found} >= set(BOARDS)
    assert found["vllm:num_requests_running", "tiny"] == 8
    assert found["vllm:num_requests_waiting", "tiny"] == 5
    assert found["vllm:kv_cache_usage_perc", "replica-0", "tiny"] == 0.4
    assert found["vllm:request_success_total", "stop", "tiny"] == 1
    assert found["vllm:generation_tokens_total", "tiny"] == 9
    assert found["megatron_async_slots_in_use",] == 8


def test_what_runs_and_waits_is_what_the_coordinator_has_booked() -> None:
    """An engine's figures are up to half a second old: 3 in slots and 2 waiting."""
    for unfinished, running, waiting in ((0, 0, 0), (1, 0, 1), (5, 3, 2), (20, 8, 12)):
        told = stats(queued_requests=0, replicas={"replica-0": engine(unfinished=unfinished)})
        found = samples(told, "vllm")
        assert found["vllm:num_requests_running", "tiny"] == running
        assert found["vllm:num_requests_waiting", "tiny"] == waiting


def test_a_service_without_replicas_has_all_names_too() -> None:
    assert samples(stats(replicas={}))["megatron_async_slots_in_use",] == 0
    without = stats()
    del without["service"]
    assert samples(without, "vllm")["vllm:num_requests_running", "tiny"] == 8


def test_a_hostile_model_name_is_one_label() -> None:
    text = metrics_text(stats(), "vllm", 'x",y="1"} 5\nfake_total 7').decode()
    assert not any(line.startswith("fake_total") for line in text.splitlines())


def test_no_torch_and_no_zmq() -> None:
    code = (
        "import sys\nimport megatron_async.server.service_metrics\n"
        "import megatron_async.server.supervisor.service\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'zmq'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
