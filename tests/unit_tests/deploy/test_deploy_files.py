"""The files under deploy/ fit what the server tells and takes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_async.cli.main import build_parser
from megatron_async.observe.metrics import COUNTERS, GAUGES
from megatron_async.server.service_metrics import OUTCOMES, metrics_text
from megatron_async.serving.service_counters import ServiceCounters

DEPLOY = Path(__file__).parents[3] / "deploy"
README = DEPLOY / "README.md"
BOARD = DEPLOY / "grafana" / "boards" / "megatron_async.json"
NAME = re.compile(r"\b(?:megatron_async|vllm)[a-z0-9_:]*")


def scraped_names() -> set[str]:
    """Every name in a scrape of a service with one replica."""
    told: dict[str, Any] = {
        **{f"{outcome}_requests": 1 for outcome in OUTCOMES},
        "state": "running", "unfinished_requests": 6, "queued_requests": 1, "clients": 2,
        "unfinished_tokens": 5,
        "replicas": {"replica-0": {"engine": dict.fromkeys((*GAUGES, *COUNTERS), 1)}},
        "service": ServiceCounters().as_dict(),
    }  # fmt: skip
    text = metrics_text(told, "own", "tiny").decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_name_on_the_board_is_in_a_scrape() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    used = {name for text in expressions(board) for name in NAME.findall(text)}
    assert len(used) > 15
    assert used - scraped_names() == set()


def test_every_panel_asks_the_datasource_that_is_provisioned() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    given = (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text("utf-8")
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"prometheus"}
    assert "uid: prometheus" in given
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)


def unit_command() -> list[str]:
    unit = (DEPLOY / "megatron-async.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    return shlex.split(line.replace("$OPTIONS", "").replace("${MODEL}", "smollm2"))[1:]


def compose_command() -> list[str]:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (found,) = re.findall(r"^    command: (\[\"serve\".*?\])$", text, re.MULTILINE | re.DOTALL)
    return list(json.loads(found))


@pytest.mark.parametrize("command", [unit_command(), compose_command()], ids=["unit", "compose"])
def test_the_command_line_has_these_options(command: list[str]) -> None:
    arguments = build_parser().parse_args(command)
    assert arguments.api_key_file


def test_whoever_stops_it_waits_longer_than_the_drain() -> None:
    drain = build_parser().parse_args(["serve", "smollm2"]).shutdown_timeout
    unit = (DEPLOY / "megatron-async.service").read_text(encoding="utf-8")
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (unit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (compose_s,) = re.findall(r"^    stop_grace_period: (\d+)s$", compose, re.MULTILINE)
    (pod_s,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", README.read_text("utf-8"))
    assert min(int(unit_s), int(compose_s), int(pod_s)) > drain


def test_what_kills_asks_for_liveness_and_what_sends_requests_for_readiness() -> None:
    probes = dict(
        re.findall(r"^(\w+)Probe:.*\n +httpGet: \{path: (/\w+),", README.read_text("utf-8"), re.M)
    )
    assert probes == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    (asked,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", (DEPLOY / "Dockerfile").read_text())
    assert asked == "/health"
