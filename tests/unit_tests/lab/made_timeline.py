"""A timeline whose gaps are known."""

from megatron_async.observe.timeline import Span, Timeline

STEPS = 6
LATE = 4
"""The step for which the CPU is late."""


def made_timeline():
    """Steps of 900 us every 1000; the CPU prepares during the step before, but is late for LATE."""
    timeline = Timeline()
    for step in range(STEPS):
        begin = 1000.0 * step + (300 if step >= LATE else 0)
        timeline.add(Span("device", "device_step", step, begin, begin + 900))
        cpu = begin - (250 if step == LATE else 600)
        timeline.add(Span("cpu", "step", step, cpu, cpu + 550))
        timeline.add(Span("cpu", "prepare_step", step, cpu, cpu + 200))
        timeline.add(Span("cpu", "schedule", step, cpu, cpu + 150))  # inside prepare_step
        timeline.add(Span("cpu", "launch_step", step, cpu + 200, cpu + 250))
        timeline.add(Span("cpu", "resolve", step - 1, cpu + 260, cpu + 300))
    return timeline
