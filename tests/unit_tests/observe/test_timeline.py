"""Named ranges and the timeline file."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_async.devices import CpuDevice
from megatron_async.observe.timeline import Span, Timeline
from megatron_async.observe.tracer import Tracer


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
