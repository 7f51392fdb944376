"""Spans of HTTP requests, as a collector gets them; without the extra they are refused by name."""

import http.server
import importlib.util
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.server.tracing import check_endpoint, is_there, make_tracer
from tests.support.patience import eventually
from tests.support.served import Served, completion

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
needs_extra = pytest.mark.skipif(not is_there(), reason="pip install 'megatron_async[tracing]'")


class Collector:
    """Takes OTLP over HTTP; `spans` are what came, decoded."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.take(self.path, body, self.headers.get("content-encoding"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes, encoding: str | None) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        assert path == "/v1/traces"
        message = ExportTraceServiceRequest()
        message.ParseFromString(gzip.decompress(body) if encoding == "gzip" else body)
        for resource in message.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = [element.string_value for element in value.values]
        found[one.key] = value
    return found


@needs_extra
def test_spans_of_a_request(tmp_path, collector: Collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
    options = ("--api-processes", "1", "--otlp-endpoint", collector.url)
    with Served(tmp_path / "log", "dummy:tiny", "--device", "cpu", *options) as served:
        eventually(lambda: served.request("/ready", key="")[0] == 200, "the service to be ready")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        status, whole = served.request("/v1/completions", completion(12, n=2), headers=headers)
        assert status == 200
        eventually(lambda: len(collector.spans) == 9, "spans of one request")
        spans, collector.spans = collector.spans, []
        list(served.stream("/v1/completions", completion(5)))
        eventually(lambda: len(collector.spans) == 5, "spans of a stream")
        assert collector.spans[-1].trace_id.hex() != TRACE
        collector.spans = []
        assert served.request("/v1/completions", {"model": 1})[0] == 400
        eventually(lambda: len(collector.spans) == 1, "the span of a refusal")
        assert attributes(collector.spans[0])["http.response.status_code"] == 400
    assert f"(trace {TRACE}) came" in (tmp_path / "log").read_text()
    assert collector.services == {"megatron-async"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    (root,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert root.parent_span_id.hex() == PARENT
    assert attributes(root)["http.response.status_code"] == 200
    choices = [span for span in spans if span.parent_span_id == root.span_id]
    assert len(choices) == 2
    for choice in choices:
        told = attributes(choice)
        assert told["gen_ai.operation.name"] == "text_completion"
        assert told["gen_ai.usage.output_tokens"] == 12
        assert told["gen_ai.usage.input_tokens"] == whole["usage"]["prompt_tokens"]
        assert told["gen_ai.response.id"] == whole["id"]
        assert told["gen_ai.response.finish_reasons"] == ["length"]
        stages = [span for span in spans if span.parent_span_id == choice.span_id]
        assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
        assert stages[0].start_time_unix_nano == choice.start_time_unix_nano
        for before, after in itertools.pairwise(stages):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert all(s.end_time_unix_nano >= s.start_time_unix_nano for s in stages)
        assert stages[-1].end_time_unix_nano == choice.end_time_unix_nano
        assert root.start_time_unix_nano <= choice.start_time_unix_nano
        assert choice.end_time_unix_nano <= root.end_time_unix_nano


def test_who_asks_for_nothing_has_no_tracer() -> None:
    assert make_tracer(None, {}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert make_tracer(None, endpoint | {"OTEL_SDK_DISABLED": "true"}) is None
    assert make_tracer(None, endpoint | {"OTEL_TRACES_EXPORTER": "none"}) is None


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="must begin with http"):
        check_endpoint("127.0.0.1:4318")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'megatron_async\[tracing\]'"):
        check_endpoint("http://127.0.0.1:4318")
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert make_tracer(None, endpoint) is None
    assert "no spans are sent" in caplog.text


def test_logs_name_the_callers_trace_without_the_extra(tmp_path: Path) -> None:
    with Served(
        tmp_path / "log", "dummy:tiny", "--device", "cpu", "--api-processes", "1"
    ) as served:
        eventually(lambda: served.request("/ready", key="")[0] == 200, "the service to be ready")
        assert served.request("/v1/completions", completion(4))[0] == 200
        assert "(trace " not in served.log.read_text()
        for header in (f"00-{TRACE}-{PARENT}-01", "no trace"):
            status, _ = served.request(
                "/v1/completions", completion(4), headers={"traceparent": header}
            )
            assert status == 200  # an invalid header is as if it were not there
        eventually(lambda: "ended (length)" in served.log.read_text(), "the log's line")
    lines = [line for line in served.log.read_text().splitlines() if "(trace " in line]
    assert [line.partition(f"(trace {TRACE}) ")[2].split()[0] for line in lines] == [
        "goes", "came,", "ended",
    ]  # fmt: skip
