"""The tests of kernels in this folder, in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.unit_tests.ops.triton_interpreter import INTERPRETED, run_in_interpreter


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="starts this very run")
@pytest.mark.parametrize("is_recurrent", [True, False])
def test_in_interpreter(is_recurrent: bool) -> None:
    # Two processes, not one for each file: imports take longer than most kernels. The kernels of
    # recurrent layers take about half of the time.
    files = Path(__file__).parent.rglob("test_*.py")
    run_in_interpreter(*sorted(str(f) for f in files if ("recurrent" in f.parts) == is_recurrent))
