"""`arrival` waits for events that tell and for events that must be asked, and blocks no loop."""

import asyncio
import threading
import time

import pytest

from megatron_async.devices import CpuDevice
from megatron_async.devices.base import Event
from megatron_async.engine import arrival as module
from megatron_async.engine.arrival import arrival


class Asked(Event):
    """An event that cannot tell; it is reached at a time, and counts questions."""

    def __init__(self, seconds=0.0, error=None):
        self.reached = time.perf_counter() + seconds
        self.error = error
        self.questions = 0
        self.waited_on = None

    def query(self):
        self.questions += 1
        if self.error is not None:
            raise self.error
        return time.perf_counter() >= self.reached

    def wait(self):
        self.waited_on = threading.current_thread()
        if self.error is not None:
            raise self.error
        time.sleep(max(self.reached - time.perf_counter(), 0))

    def wait_for(self, seconds):
        raise NotImplementedError

    def time_us(self):
        raise NotImplementedError


async def wait_in_a_thread(event):
    await asyncio.to_thread(event.wait)


def turns_during(event, wait=wait_in_a_thread):
    """Turns of another coroutine while `event` is waited for."""

    async def run():
        waiting = asyncio.create_task(arrival(event, wait))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0)
            turns += 1
        await waiting
        return turns

    return asyncio.run(run())


def test_an_event_is_asked_between_turns(monkeypatch):
    monkeypatch.setattr(module, "ASK_FOR_S", 30.0)
    event = Asked(0.02)
    assert turns_during(event) > 5
    assert event.waited_on is threading.main_thread(), "there was no thread to wait"
    assert event.questions > 5


def test_what_takes_long_waits_on_a_thread():
    event = Asked(0.2)
    assert turns_during(event) > 5
    # Asked for 2 ms, and once at the end.
    assert event.questions < 2000
    assert time.perf_counter() >= event.reached


def test_a_cpu_event_tells(monkeypatch):
    """No thread and no polling: the stream's own thread wakes the loop."""
    monkeypatch.setattr(module, "TOLD_WITHIN_S", 30.0)
    device = CpuDevice()
    event = device.event()
    for delay in (0.05, 0.0, 0.02):  # again and again, also if it is there already
        device.compute.launch(lambda delay=delay: time.sleep(delay))
        device.compute.record(event)
        turns_during(event, wait=None)
        assert event.query()
    device.close()


def test_a_late_cpu_event_waits_on_a_thread(monkeypatch):
    monkeypatch.setattr(module, "TOLD_WITHIN_S", 0.01)
    device, waited = CpuDevice(), []
    event = device.event()
    device.compute.launch(lambda: time.sleep(0.1))
    device.compute.record(event)

    async def wait(event):
        waited.append(event)
        await wait_in_a_thread(event)

    assert turns_during(event, wait) > 5
    assert waited == [event]
    device.close()


@pytest.mark.parametrize("kind", ["asked", "tells"])
def test_what_failed_is_raised_by_wait(kind):
    """A group asks other ranks first what has happened."""
    device, waited = CpuDevice(), []
    if kind == "asked":
        event = Asked(error=ZeroDivisionError())
    else:
        event = device.event()
        device.compute.launch(lambda: 1 / 0)
        device.compute.record(event)

    async def wait(event):
        waited.append(event)
        await wait_in_a_thread(event)

    with pytest.raises((ZeroDivisionError, RuntimeError)):
        turns_during(event, wait)
    assert waited == [event]
    device.close()


def test_a_cancelled_wait_leaves_a_sound_stream():
    """The loop is gone when the event is reached: the stream must not take that for a fault."""
    device = CpuDevice()
    event = device.event()
    device.compute.launch(lambda: time.sleep(0.1))
    device.compute.record(event)

    async def run():
        waiting = asyncio.create_task(arrival(event, wait_in_a_thread))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    event.wait()
    device.compute.launch(lambda: None)
    device.compute.record(event)
    event.wait()
    device.close()
