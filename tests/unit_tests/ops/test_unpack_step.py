"""The unpack and feed-back kernels against plain torch, in Triton's interpreter (or on a GPU)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).with_name("check_unpack_step.py")


@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_kernels_do_what_torch_does(where):
    # A process of its own: whether Triton interprets is decided when it is imported.
    environment = dict(os.environ)
    if where == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, str(CHECK), where], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
