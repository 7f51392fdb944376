"""The gap report of a step timeline, on timelines whose gaps are known."""

import json

import pytest

from megatron_async.lab.step_gaps import gap_record, gap_text, step_gaps, time_text
from megatron_async.observe.timeline import Span, Timeline
from tests.unit_tests.lab.made_timeline import LATE, STEPS, made_timeline


def test_gaps_and_who_was_late():
    report = step_gaps(made_timeline())
    assert [gap.step for gap in report.gaps] == list(range(1, STEPS))
    assert [gap.gap_us for gap in report.gaps] == [100, 100, 100, 400, 100]
    assert [gap.is_launched_ahead for gap in report.gaps] == [True, True, True, False, True]
    assert report.worst[0].step == LATE
    assert report.typical.step == 1
    assert report.busy_share == pytest.approx(4500 / 5300)
    assert report.launched_ahead_share == pytest.approx(0.8)


def test_what_the_cpu_did():
    late = step_gaps(made_timeline()).worst[0]
    # The gap is from 3900 to 4300, the call of step 4 begins at 4050.
    assert late.in_gap_us == {"prepare": 200, "between steps": 150, "launch": 50}
    assert list(late.in_gap_us) == ["prepare", "between steps", "launch"]  # longest first
    assert late.cpu_us == {"prepare": 200, "launch": 50, "wait": 40}
    ahead = step_gaps(made_timeline()).gaps[0]
    # From 900 to 1000: of the call that ends at 950, none of its stages.
    assert ahead.in_gap_us == {"rest of step": 50, "between steps": 50}


def test_steps_that_touch_have_no_gap():
    timeline = Timeline()
    timeline.add(Span("device", "device_step", 0, 0, 100))
    timeline.add(Span("device", "device_step", 1, 99.5, 200))  # the clock's own error
    gap = step_gaps(timeline).gaps[0]
    assert (gap.gap_us, gap.in_gap_us) == (0, {})


def test_one_step_is_not_enough():
    timeline = Timeline()
    timeline.add(Span("device", "device_step", 0, 0, 100))
    with pytest.raises(ValueError, match="1 steps on the device"):
        step_gaps(timeline)


def test_time_with_nothing_to_do_is_no_gap():
    timeline = made_timeline()
    timeline.add(Span("cpu", "no overlap: after_idle", LATE, 0, 0))
    timeline.add(Span("cpu", "no overlap: nothing_to_plan", 2, 0, 0))
    report = step_gaps(timeline)
    assert [gap.step for gap in report.after_idle] == [LATE]
    assert [gap.gap_us for gap in report.gaps] == [100, 100, 100, 100]
    causes = ["device's own", "nothing to plan", "device's own", "device's own"]
    assert [gap.cause for gap in report.gaps] == causes
    text = gap_text(report, {"model": "m"})
    assert "not counted: 1 times there was nothing to do, 400 us in all" in text


def test_files():
    report, facts = step_gaps(made_timeline()), {"model": "m", "workload": "steady"}
    text = gap_text(report, facts)
    assert f"step      {LATE}     400 us  CPU late         prepare 200 us, between steps" in text
    assert "device busy 84.91%; 80.0% of 5 steps" in text
    record = json.loads(json.dumps(gap_record(report, facts)))
    assert record["worst_steps"][0] == LATE
    assert record["gap_us"]["p50"] == 100
    assert record["gap_us"]["max"] == 400
    assert record["steps"][3]["in_gap_us"]["prepare"] == 200
    assert record["cpu_us"]["prepare"]["p50"] == 200


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0.00 us"), (9.99, "9.99 us"), (9.996, "10.0 us"), (99.96, "100 us"),
        (999.4, "999 us"), (999.6, "1.00 ms"), (1234, "1.23 ms"), (2e6, "2.00 s"),
    ],
)  # fmt: skip
def test_times_have_three_digits(microseconds, text):
    assert time_text(microseconds) == text
