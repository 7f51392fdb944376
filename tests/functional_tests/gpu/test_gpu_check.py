"""`megatron-async check` in the bit-stable mode: no bit differs, on one GPU and over ranks."""

import contextlib
import io

import pytest

from megatron_async.cli.main import main
from tests.support import gpu_ranks  # noqa: F401  # adds shapes
from tests.support.ranks import run_ranks

EXPERTS = (
    "dummy:qwen3_moe:layers=2,hidden=256,heads=8,groups=4,head=64,ffn=128,vocab=1024,experts=8,"
    "topk=2"
)
SMALL = [
    "--needles", "6", "--tokens", "24", "--max-requests", "16", "--max-sequence-length", "300",
    "--block-size-tokens", "16", "--no-progress", "--batch-invariant-mode",
]  # fmt: skip
CASES = ["batch", "order", "chunks", "warm", "evicted"]


def check(model: str, *arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return main(["check", model, *SMALL, *arguments]), output.getvalue()


@pytest.mark.parametrize(
    ("world", "model", "sizes", "cases"),
    [
        pytest.param(1, EXPERTS, "", ["lookahead", "suspended"], marks=pytest.mark.gpu),
        pytest.param(1, "dummy:gpu-mamba-mtp", "", ["drafts"], marks=pytest.mark.gpu),
        pytest.param(2, EXPERTS, "tensor", [], marks=pytest.mark.gpus(2)),
        pytest.param(2, EXPERTS, "expert", ["idle"], marks=pytest.mark.gpus(2)),
        pytest.param(2, "dummy:gpu-mamba-mtp", "tensor", ["drafts"], marks=pytest.mark.gpus(2)),
    ],
    ids=["one", "hybrid", "tensor", "experts", "hybrid, tensor"],
)
def test_no_bit_differs(world: int, model: str, sizes: str, cases: list[str]) -> None:
    """Break it: add sums of a step's few rows in another order, in any kernel of the mode."""
    split = [f"--{sizes}-model-parallel-size", "2"] if sizes else []
    told = run_ranks(world, check, model, *split, "--cases", *CASES, *cases, timeout_s=180)
    output = told[0][1]
    assert [status for status, _ in told] == [0] * world, output
    assert "; 0 log probs differ\n" in output
    assert "batch_invariant_mode promises equal bits" in output
    for case in "warm", "evicted", "idle":
        if case in [*CASES, *cases]:
            assert any(case in line and "untested" not in line for line in output.splitlines())
