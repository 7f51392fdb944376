"""From a profiler's kernels: where a device idles between steps, and a step's time divided among
kernels that overlap."""

from __future__ import annotations

import pytest

from megatron_async.lab.gpu_profile import DeviceActivity, gap_report, kernel_shares


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
