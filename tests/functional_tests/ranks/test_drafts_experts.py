"""Ranks that share experts agree on a width; a rank without drafts pads its rows: the same tokens.

Break one of these, and a test fails:

- `HostStaging.pack`: write `plan.dims.width` as `decode_width`
- `unpack_rows`: take the step's width for its rows' own
- `SharedExperts.agree`: keep each rank's own width
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.devices import CpuDevice, CudaDevice
from tests.support.drafting_experts import (
    DRAFTS,
    LOOKAHEADS,
    NUMBERS,
    TINY_EXPERTS,
    RankRun,
    SeenStep,
    answers,
    drafting,
)
from tests.support.harness import CPU, make_engine, make_model
from tests.support.ranks import run_ranks

WIDE = DRAFTS + 1
Alone = tuple[list[list[int]], list[Any]]


Runs = list[tuple[RankRun, RankRun]]
"""Runs of both ranks, by lookahead."""


def plain(device: torch.device) -> Alone:
    on_gpu = device.type == "cuda"
    engine = make_engine(
        make_model(TINY_EXPERTS, device), device=CudaDevice() if on_gpu else CpuDevice(),
        lookahead=0, num_cuda_graphs=0,
    )  # fmt: skip
    found = answers(engine)
    engine.close()
    return found


def run(folder: Path, drafter: str, alone: Alone, on_gpus: bool = False) -> Runs:
    save_huggingface(make_model(TINY_EXPERTS), TINY_EXPERTS, None, folder)
    ranks = run_ranks(2, drafting, str(folder), drafter, alone[0], on_gpus)
    return list(zip(*ranks, strict=True))


@pytest.fixture(scope="module")
def alone() -> Alone:
    return plain(CPU)


@pytest.fixture(scope="module", params=["oracle", "fickle"])
def runs(request: Any, alone: Alone, tmp_path_factory: Any) -> Runs:
    return run(tmp_path_factory.mktemp("model"), request.param, alone)


def check_answers(alone: Alone, runs: Runs) -> None:
    """Both ranks' requests say what they say alone, and drafts were accepted."""
    for lookahead, ranks in zip(LOOKAHEADS, runs, strict=True):
        for rank, numbers in zip(ranks, NUMBERS, strict=True):
            assert rank.accepted > 10, lookahead
            found = zip(numbers, rank.tokens, rank.log_probs, strict=True)
            for number, tokens, log_probs in found:
                wanted = alone[1][number]
                assert tokens == wanted.generated_tokens, (lookahead, number)
                if wanted.generated_log_probs is not None:
                    expected = pytest.approx(wanted.generated_log_probs, abs=1e-4)
                    assert log_probs == expected, (lookahead, number)


def narrow_steps(ranks: tuple[RankRun, RankRun]) -> list[SeenStep]:
    """Steps of width 1 of one rank that the other one made a wide one."""
    pairs = list(zip(ranks[0].steps, ranks[1].steps, strict=True))
    assert all(one.agreed_width == other.agreed_width for one, other in pairs)
    both = [*pairs, *((other, one) for one, other in pairs)]
    found = [own for own, other in both if own.width == 1 and other.width == WIDE]
    assert all(step.agreed_width == WIDE for step in found)
    assert all(step.dims_width == WIDE for step in found if step.is_captured)
    return found


def test_both_say_what_one_rank_says(alone: Alone, runs: Runs) -> None:
    check_answers(alone, runs)


def test_a_rank_was_narrower_than_the_step(runs: Runs) -> None:
    for lookahead, ranks in zip(LOOKAHEADS, runs, strict=True):
        steps = narrow_steps(ranks)
        # No blocks for drafts; and prefill alone, which is not captured on a CPU.
        assert any(step.decode_rows and step.is_captured for step in steps), lookahead
        assert any(step.chunks and not step.decode_rows for step in steps), lookahead


@pytest.mark.gpus(2)
def test_on_gpus(tmp_path: Path) -> None:
    """There, steps with prefill are captured, too."""
    alone = plain(torch.device("cuda"))
    runs = run(tmp_path, "oracle", alone, on_gpus=True)
    check_answers(alone, runs)
    for lookahead, ranks in zip(LOOKAHEADS, runs, strict=True):
        steps = [step for step in narrow_steps(ranks) if step.is_captured]
        assert any(step.decode_rows for step in steps), lookahead
        assert any(step.chunks and not step.decode_rows for step in steps), lookahead
