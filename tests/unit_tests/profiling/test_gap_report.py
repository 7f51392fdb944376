"""The gap report: where a device idles between steps, from a profiler's kernels."""

import pytest

from megatron_async.profiling.gpu_profile import DeviceActivity, gap_report


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
