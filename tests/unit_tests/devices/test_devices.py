"""Streams and events behave alike on a GPU and on threads."""

import gc
import threading
import time

import pytest
import torch

from megatron_async.devices import Chaos, CpuDevice, CudaDevice, make_device, resolve_device_name
from megatron_async.devices.cpu import current_stream_name
from megatron_async.errors import ConfigurationError
from tests.support.patience import PATIENCE_S

gpu = pytest.param(CudaDevice, marks=pytest.mark.gpu)


@pytest.fixture(params=[CpuDevice, gpu])
def device(request):
    device = request.param()
    yield device
    device.close()


def test_work_runs_in_order(device):
    x = torch.zeros(1, device=device.torch_device)
    device.fence()
    for i in range(50):
        device.compute.launch(lambda i=i: x.mul_(2).add_(i % 2))
    done = device.event()
    device.compute.record(done)
    done.wait()
    expected = torch.zeros(1)
    for i in range(50):
        expected.mul_(2).add_(i % 2)
    assert done.query()
    assert torch.equal(x.cpu(), expected)


def test_a_stream_waits_for_another(device):
    source = torch.zeros(1 << 20, device=device.torch_device)
    host = device.host_buffer(len(source), torch.float32)
    device.fence()
    ready, copied = device.event(), device.event()
    for i in range(1, 6):
        device.compute.launch(lambda i=i: source.fill_(i))
        device.compute.record(ready)
        device.copy.wait(ready)
        device.copy.launch(lambda: host.copy_(source, non_blocking=True))
        device.copy.record(copied)
        copied.wait()
        assert (host == i).all()


def test_timed_events_are_on_the_host_clock(device):
    start, end = device.event(timing=True), device.event(timing=True)
    before = time.perf_counter_ns() / 1e3
    device.compute.record(start)
    device.compute.record(end)
    end.wait()
    after = time.perf_counter_ns() / 1e3
    assert before - 500 <= start.time_us() <= end.time_us() <= after + 500
    assert end.us_since(start) == pytest.approx(end.time_us() - start.time_us(), abs=5)


def test_a_launch_returns_before_its_work_is_done():
    device = CpuDevice()
    gate, done = threading.Event(), device.event()
    device.compute.launch(gate.wait)
    device.compute.record(done)
    assert not done.query()
    gate.set()
    done.wait()
    device.close()


def test_a_fault_is_sticky_and_reported_at_the_wait():
    device = CpuDevice()
    ran = []

    def fail():
        raise ZeroDivisionError("made up")

    device.compute.launch(fail)
    device.compute.launch(lambda: ran.append(1))
    done = device.event()
    device.compute.record(done)
    with pytest.raises(RuntimeError) as error:
        done.wait()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert not ran
    device.close()


def test_close_runs_what_is_queued_and_ends_the_threads():
    before = set(threading.enumerate())
    device = CpuDevice(Chaos(seed=1, probability=1.0))
    ran, names = [], []
    for i in range(5):
        device.compute.launch(lambda i=i: ran.append(i))
    device.copy.launch(lambda: names.append(current_stream_name()))
    device.close()
    assert ran == list(range(5))
    assert names == ["copy"]
    assert current_stream_name() is None
    assert set(threading.enumerate()) <= before


def test_a_fault_reaches_the_stream_that_waits_for_it():
    device = CpuDevice()
    copied, arrived = [], device.event()
    sampled = device.event()

    def fail():
        raise ZeroDivisionError("made up")

    device.compute.launch(fail)
    device.compute.record(sampled)
    device.copy.wait(sampled)
    device.copy.launch(lambda: copied.append(1))
    device.copy.record(arrived)
    with pytest.raises(RuntimeError) as error:
        arrived.wait()
    assert isinstance(error.value.__cause__.__cause__, ZeroDivisionError)
    assert not copied
    device.close()


def test_an_event_may_be_recorded_again():
    device = CpuDevice()
    event, gate = device.event(), threading.Event()
    device.compute.record(event)
    event.wait()
    device.compute.launch(gate.wait)
    device.compute.record(event)
    assert not event.query(), "the first recording is forgotten at once"
    gate.set()
    event.wait()
    device.close()


def test_each_wait_is_for_the_recording_before_it():
    """An event is recorded again while a stream has not come to its wait for the first recording:
    the first recording lets the first wait pass, and not the second."""
    device = CpuDevice(Chaos(seed=0, probability=0.0))
    gates, passed = ([threading.Event(), threading.Event()] for _ in range(2))
    arrived = device.event()
    for gate, done in zip(gates, passed, strict=True):
        device.upload.launch(gate.wait)
        device.upload.record(arrived)
        device.compute.wait(arrived)
        device.compute.launch(done.set)
    try:
        gates[0].set()
        assert passed[0].wait(PATIENCE_S)
        assert not passed[1].wait(0.05)
        assert not arrived.query()
        gates[1].set()
        assert passed[1].wait(PATIENCE_S)
        assert arrived.query()
    finally:
        gates[1].set()
        device.close()


def delays(seed, monkeypatch):
    """Delays of the compute stream over 50 launches, seconds."""
    slept = []
    with monkeypatch.context() as patch:
        patch.setattr("megatron_async.devices.cpu.time.sleep", slept.append)
        device = CpuDevice(Chaos(seed=seed, probability=0.5, max_delay_s=0.01))
        for _ in range(50):
            device.compute.launch(lambda: None)
        device.close()
    return slept


def test_chaos_is_reproducible(monkeypatch):
    first = delays(3, monkeypatch)
    assert first == delays(3, monkeypatch)
    assert first != delays(4, monkeypatch)
    assert 10 < len(first) < 60
    assert all(0 <= delay <= 0.01 for delay in first)


def test_a_closed_device_refuses_work():
    device = CpuDevice()
    event = device.event()
    device.close()
    device.close()
    for use in (
        lambda: device.compute.launch(lambda: None),
        lambda: device.copy.record(event),
        lambda: device.copy.wait(event),
    ):
        with pytest.raises(RuntimeError, match="the device is closed"):
            use()


def test_a_forgotten_device_ends_its_threads():
    before = set(threading.enumerate())
    device = CpuDevice()
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del device
    gc.collect()
    assert not any(thread.is_alive() for thread in started)


def test_a_cpu_captures_no_graphs(device):
    if not device.captures_graphs:
        with pytest.raises(RuntimeError, match="captures no graphs"):
            device.capture(lambda: None)


def test_host_memory_is_no_device_memory(device):
    host = device.host_buffer(5, torch.int32)
    assert host.device.type == "cpu"
    assert host.tolist() == [0] * 5
    assert host.is_pinned() == (device.torch_device.type == "cuda")
    assert device.free_memory() > 1 << 20


@pytest.mark.parametrize("name", ["gpu", "cpu:", "cuda:x", "", "mps"])
def test_unknown_device(name):
    with pytest.raises(ConfigurationError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        resolve_device_name(name)


def test_torch_devices_are_names_too():
    assert resolve_device_name(torch.device("cpu")) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu():
    assert resolve_device_name(None) == "cpu"
    with pytest.raises(ConfigurationError, match="no usable GPU"):
        make_device("cuda")
