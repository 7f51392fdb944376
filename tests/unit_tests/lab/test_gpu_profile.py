"""Gaps between steps: of a profiler's kernels, and of timelines whose gaps are known."""

import json

import pytest

from megatron_async.lab.gpu_profile import DeviceActivity, gap_report, kernel_shares
from megatron_async.lab.step_gaps import gap_record, gap_text, step_gaps, time_text
from megatron_async.observe.timeline import Span, Timeline
from tests.unit_tests.lab.made_timeline import LATE, STEPS, made_timeline


def test_gap_report():
    activities = []
    for step in range(5):
        begin = 100.0 * step
        activities += [
            DeviceActivity("Memcpy HtoD", begin - 3, begin - 1),
            DeviceActivity("first_kernel", begin, begin + 10),
            DeviceActivity("gemm", begin + 12, begin + 95 - (step == 2) * 20),
        ]
    report = gap_report(reversed(activities), "first")
    assert report.steps == 4
    assert report.step_us == 100
    assert report.gap_us == 5
    assert report.gap_p99_us == 25
    assert report.kernels == 2
    assert report.busy_share == pytest.approx((4 * 93 - 20) / 400)
    with pytest.raises(ValueError, match="'absent'"):
        gap_report(activities, "absent")


def timeline() -> list[DeviceActivity]:
    """Two steps of three kernels: "product" runs twice, and starts before "norm" has ended."""
    step = [
        ("norm", 0, 4),
        ("product", 2, 9),
        ("norm", 8, 12),
        ("product", 11, 13),
        ("pick", 13, 20),
    ]
    return [
        DeviceActivity(name, start + at, end + at)
        for at in (0.0, 20.0)
        for name, start, end in step
    ]


def test_what_is_waited_for_adds_up_to_the_time_of_all_steps() -> None:
    shares = kernel_shares(reversed(timeline()), 2)

    assert sum(share.waited_us for share in shares) == pytest.approx(20)
    by_place = {(share.name, share.after): share for share in shares}
    assert by_place["product", "norm"].waited_us == pytest.approx((9 - 4) + (13 - 12))
    assert by_place["product", "norm"].run_us == pytest.approx(7 + 2)
    assert by_place["product", "norm"].calls == 2


def test_uses_of_a_kernel_are_told_apart_by_the_kernel_before() -> None:
    shares = kernel_shares(timeline(), 2)

    places = {share.after: share.waited_us for share in shares if share.name == "norm"}
    assert places == {"": pytest.approx(2), "product": pytest.approx(3), "pick": pytest.approx(2)}
    assert shares[0].name == "pick"


def test_a_kernel_that_ends_within_another_is_not_waited_for() -> None:
    activities = [DeviceActivity("long", 0, 10), DeviceActivity("short", 2, 5)]

    assert {share.name: share.waited_us for share in kernel_shares(activities, 1)} == {
        "long": 10,
        "short": 0,
    }


def test_no_activities_have_no_shares() -> None:
    assert kernel_shares([], 1) == []


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
