"""The tests of kernels in this folder, in Triton's interpreter."""

from pathlib import Path

import pytest
from triton_interpreter import INTERPRETED, run_in_interpreter

GROUPS = {
    "a-l": "test_[a-l]*.py", "m-z": "test_[m-z]*.py",
    "delta": "recurrent/test_d*.py", "recurrent": "recurrent/test_[!d]*.py",
}  # fmt: skip
"""Files that one process runs; scans of prompts take longest, and have two to themselves."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="starts this very run")
@pytest.mark.parametrize("group", GROUPS)
def test_in_interpreter(group: str) -> None:
    # Few processes, not one for each file: imports take longer than most kernels.
    names, folder = GROUPS[group], Path(__file__).parent
    files = folder.glob(names) if "/" in names else folder.rglob(names)
    is_scan = "/" in names
    run_in_interpreter(*sorted(str(f) for f in files if ("recurrent" in f.parts) == is_scan))
