"""`traceparent` of W3C: what is one, and which requests the log speaks of."""

import logging

import pytest

from megatron_async.requests.traces import MOST_NAMED, is_sampled, named, read_traceparent, trace_id
from tests.support.harness import TINY, drain, greedy, make_engine, make_model

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
MODEL = make_model(TINY)


def test_what_is_read() -> None:
    assert read_traceparent(SAMPLED) == SAMPLED
    assert read_traceparent(f"cc-{TRACE}-{PARENT}-03-more") == f"00-{TRACE}-{PARENT}-03"
    assert trace_id(SAMPLED) == TRACE
    assert is_sampled(SAMPLED)
    assert is_sampled(f"00-{TRACE}-{PARENT}-03")
    assert not is_sampled(UNSAMPLED)
    assert not is_sampled("")
    assert named(5, SAMPLED) == f"Request 5 (trace {TRACE})"


@pytest.mark.parametrize(
    "text",
    [
        "", "00", TRACE, f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1", f"{SAMPLED}\n", f"00-{TRACE}-{PARENT}-\u0661\u0661",
    ],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    assert read_traceparent(text) == ""


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "megatron_async"]


def test_the_log_names_sampled_requests_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_async")
    engine = make_engine(MODEL, logging_step_interval=1)
    caplog.clear()
    for number, trace in enumerate(("", UNSAMPLED)):
        engine.add_request(number, [1, 2, 3], greedy(3), traceparent=trace)
    drain(engine)
    assert not [line for line in _lines(caplog) if "Request" in line or "trace" in line]
    caplog.clear()
    engine.add_request(2, [1, 2, 3], greedy(3), traceparent=SAMPLED)
    assert engine.get_request(2).traceparent == SAMPLED
    drain(engine)
    came, *others = [line for line in _lines(caplog) if TRACE in line]
    (ended,) = [line for line in others if line.startswith("Request")]
    steps = [line for line in others if line != ended]
    assert came == f"Request 2 (trace {TRACE}) came, with 3 prompt tokens."
    assert ended.startswith(f"Request 2 (trace {TRACE}) ended (length): 3 tokens, first token 0.")
    assert steps
    assert all(line.endswith(f"waiting; traces {TRACE}") for line in steps)
    assert engine.requests.traces.names() == ""
    engine.close()


def test_a_failure_names_its_trace_though_nobody_records_it(caplog):
    caplog.set_level(logging.INFO, "megatron_async")
    engine = make_engine(MODEL)
    caplog.clear()
    engine.add_request(1, [1], greedy(3, temperature=-1.0), traceparent=UNSAMPLED)
    engine.add_request(2, [1], greedy(3), traceparent=UNSAMPLED)
    engine.abort_request(2)
    failed, aborted = [r for r in caplog.records if TRACE in r.getMessage()]
    assert failed.levelno == logging.WARNING
    assert "Request 1" in failed.getMessage()
    assert "temperature=-1.0" in failed.getMessage()
    assert aborted.levelno == logging.INFO
    assert "Request 2" in aborted.getMessage()
    engine.close()


def test_a_line_names_a_few_traces() -> None:
    engine = make_engine(MODEL)
    for number in range(MOST_NAMED + 2):
        trace = f"00-{number + 1:032x}-{PARENT}-01"
        engine.add_request(number, [1], greedy(3), traceparent=trace)
    names = engine.requests.traces.names()
    assert names.startswith(f"; traces {1:032x}, {2:032x}")
    assert names.endswith(" and 2 more")
    engine.close()


def test_the_timeline_says_when_a_traced_request_came() -> None:
    from megatron_async.observe.timeline import Timeline

    engine = make_engine(MODEL)
    engine.tracer.timeline = Timeline()
    engine.add_request(3, [1], greedy(3), traceparent=UNSAMPLED)
    engine.add_request(4, [1], greedy(3))
    notes = [span.name for span in engine.tracer.timeline.spans if "Request" in span.name]
    assert notes == [f"Request 3 (trace {TRACE})"]
    engine.close()
