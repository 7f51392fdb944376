"""The tests of kernels in this folder, in Triton's interpreter."""

from pathlib import Path

import pytest
from triton_interpreter import INTERPRETED, run_in_interpreter


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts this very run")
@pytest.mark.parametrize("names", ["test_[a-l]*.py", "test_[m-r]*.py", "test_[s-z]*.py"])
def test_in_interpreter(names: str) -> None:
    # Few processes, not one for each file: imports take longer than most kernels.
    files = sorted(map(str, Path(__file__).parent.rglob(names)))
    run_in_interpreter(*files)
