"""The unpack and feed-back kernels against plain torch, in Triton's interpreter (or on a GPU)."""

import runpy
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("check_unpack_step.py")


def test_kernels_do_what_torch_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(CHECK), device])
    runpy.run_path(str(CHECK))
