"""`RequestTracer`: OpenTelemetry spans of HTTP requests, sent by OTLP; an optional extra.

Spans are made in the API process when a request has ended, from times that are booked anyway: the
replica tells queue, first token and latency with each end. So no engine makes spans. A request's
`traceparent` goes with it, for the logs of coordinator and replicas.

Names and attributes are those of OpenTelemetry's semantic conventions for HTTP and generative AI
(1.37); what these lack is called `megatron_async.*`. Headers are W3C's `traceparent` and
`tracestate`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigurationError
from megatron_async.server.fields.asked import Asked, AskedChoice
from megatron_async.server.fields.refusal import Refusal, refusal_of
from megatron_async.server.http.replies import ClientGone

if TYPE_CHECKING:
    from megatron_async.server.choice_feed import ChoiceFeed

logger = logging.getLogger("megatron_async")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that turn tracing on, as everywhere."""
NEEDS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
SERVICE = "megatron-async"
NS = 10**9
CANCELLED = 499
"""Status of a request whose client has disconnected; nginx' number."""


def is_there() -> bool:
    """Whether the extra is installed."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in NEEDS)
    except ModuleNotFoundError:
        return False


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigurationError if `--otlp-endpoint` is no URL, or the extra is not installed."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"--otlp-endpoint {endpoint!r} must begin with http:// or https://, as in "
            "http://127.0.0.1:4318."
        )
    if not is_there():
        raise ConfigurationError(
            f"--otlp-endpoint {endpoint} needs OpenTelemetry: pip install "
            "'megatron_async[tracing]' (opentelemetry-sdk and its OTLP exporter for HTTP)."
        )


def make_tracer(endpoint: str | None, environ: Mapping[str, str]) -> RequestTracer | None:
    """The tracer that is asked for; None: nobody asks, and nothing is imported. Without
    `--otlp-endpoint` OpenTelemetry's own variables are honoured, and turn tracing on."""
    if endpoint is None:
        is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        is_off |= environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
        found = [name for name in ENDPOINTS if environ.get(name)]
        if is_off or not found:
            return None
        if not is_there():
            logger.warning(
                "%s is set, and no spans are sent: pip install 'megatron_async[tracing]', "
                "or set OTEL_SDK_DISABLED=true.",
                found[0],
            )
            return None
    return RequestTracer(endpoint)


def _status(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, asyncio.CancelledError | ClientGone):
        return CANCELLED
    return refusal_of(type(error).__name__, "").status


class RequestTracer:
    """Makes spans and sends them, in a thread of OpenTelemetry's. To the endpoint "/v1/traces" is
    added; None: the environment's."""

    def __init__(self, endpoint: str | None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("megatron_async")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> RequestTrace:
        """A request has come."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        parent = self._propagator.extract(carrier)
        return RequestTrace(self._tracer, parent, scope["method"], scope["path"])

    def close(self) -> None:
        """Send the spans that wait; takes as long as the collector, 10 s at most by default."""
        self._provider.shutdown()


class RequestTrace:
    """The spans of one HTTP request."""

    def __init__(self, tracer: Any, parent: Any, method: str, path: str) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer = tracer
        attributes = {"http.request.method": method, "url.path": path, "http.route": path}
        self._root = tracer.start_span(
            f"{method} {path}", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        self._context = set_span_in_context(self._root, parent)
        self._within = set_span_in_context
        self._asked: Asked | None = None
        self._model = ""
        self._feeds: Sequence[ChoiceFeed] = ()
        self._operation = "chat" if path.endswith("/chat/completions") else "text_completion"
        self._sent_ns = 0

    @property
    def traceparent(self) -> str:
        """W3C's header for the coordinator and the replicas that serve the request."""
        own = self._root.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def sent(self, asked: Asked, feeds: Sequence[ChoiceFeed]) -> None:
        """The requests go to the coordinator now."""
        self._asked, self._feeds, self._model = asked, feeds, asked.style.model
        self._sent_ns = time.time_ns()

    def end(self, error: BaseException | None) -> None:
        """Make all spans: the request is answered, or has failed."""
        from opentelemetry.trace import StatusCode

        status = 200
        if error is not None:
            status = _status(error)
            self._root.set_attribute("error.type", type(error).__name__)
            if status >= 500:
                self._root.set_status(StatusCode.ERROR)
        self._root.set_attribute("http.response.status_code", status)
        if self._asked is not None and self._root.is_recording():
            for choice, feed in zip(self._asked.choices, self._feeds, strict=True):
                self._end_choice(choice, feed, self._asked.style.id)
        self._root.end()

    def _end_choice(self, choice: AskedChoice, feed: ChoiceFeed, response_id: str) -> None:
        from opentelemetry.trace import StatusCode

        params, end = choice.params, feed.end
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "megatron_async",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": response_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
        }
        if params.num_tokens_to_generate is not None:
            attributes["gen_ai.request.max_tokens"] = params.num_tokens_to_generate
        if end is not None:
            attributes |= {
                "gen_ai.usage.input_tokens": end.num_prompt_tokens,
                "gen_ai.usage.output_tokens": end.num_generated_tokens,
                "gen_ai.response.finish_reasons": [end.finish_reason or "error"],
                "megatron_async.replica": end.replica,
                "megatron_async.attempts": end.attempts,
            }
            if end.num_cached_tokens is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = end.num_cached_tokens
        ended_ns = feed.ended_ns or time.time_ns()
        span = self._tracer.start_span(
            f"{self._operation} {self._model}", context=self._context, attributes=attributes,
            start_time=self._sent_ns,
        )  # fmt: skip
        failure = ("aborted", "") if end is None else end.failure
        if end is None or failure is not None:
            span.set_attribute("error.type", (failure or ("aborted",))[0])
            span.set_status(StatusCode.ERROR)
        elif end.latency is not None:
            self._end_stages(span, end, ended_ns)
        span.end(ended_ns)

    def _end_stages(self, span: Any, end: Any, ended_ns: int) -> None:
        """Queue, prefill and decode. The replica tells how long each took; its clock is another, so
        they are counted back from the end. The wait in the coordinator is part of the queue."""
        came_ns = max(ended_ns - int(end.latency * NS), self._sent_ns)
        admitted_ns = min(came_ns + int((end.queue_s or 0.0) * NS), ended_ns)
        first_ns = ended_ns
        if end.ttft is not None:
            first_ns = min(max(came_ns + int(end.ttft * NS), admitted_ns), ended_ns)
        context = self._within(span, self._context)
        for name, start, stop in (
            ("queue", self._sent_ns, admitted_ns),
            ("prefill", admitted_ns, first_ns),
            ("decode", first_ns, ended_ns),
        ):
            stage = self._tracer.start_span(name, context=context, start_time=start)
            stage.end(stop)
