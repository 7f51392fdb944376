"""`check`: models that keep their promise pass, and planted faults are found and named."""

import contextlib
import io
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import LLM
from megatron_async.cli.main import main
from megatron_async.lab import check_cases, check_run
from megatron_async.lab.check_cases import Answer
from megatron_async.lab.check_command import CASES
from megatron_async.lab.check_outcomes import Judge, digest
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.planning.prefix_cache import PrefixCache
from megatron_async.planning.scheduler import Scheduler
from tests.support.ranks import run_ranks

SMALL = ["--device", "cpu", "--needles", "2", "--tokens", "10", "--max-requests", "3"]


def check(model: str, *arguments: str) -> int:
    return main(["check", f"dummy:{model}", *SMALL, *arguments])


def row(output: str, label: str) -> list[str]:
    """What the table says of a case, behind its label."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).split()


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-hybrid-mtp"])
def test_models_pass(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, made = tmp_path / "check.json", list[weakref.ref[Any]]()

    def make(*arguments: Any, **named: Any) -> LLM:
        assert not any(each() for each in made), "an engine before has its memory still"
        llm = LLM(*arguments, **named)
        made.extend(map(weakref.ref, (llm.engine.context, llm.engine.controller)))
        return llm

    monkeypatch.setattr(check_run, "LLM", make)
    assert check(model, "--json", str(file)) == 0
    output = capsys.readouterr().out
    assert output.endswith("OK\n")
    found = json.loads(file.read_text())["figures"]
    assert {case["case"] for case in found} == CASES.keys() - {"idle"}
    assert [case["failed"] for case in found] == [0] * len(found)
    # 10 tokens of two needles, each twice where prompts are found.
    assert {case["label"]: case["tokens"] for case in found if case["tokens"] != 20} == {"warm": 40}
    assert max(map(len, output.splitlines()[: len(found) + 1])) <= 80  # columns of a terminal
    happened = {case["label"]: case["happened"] for case in found if case["happened"]}
    drafts = ["drafts: ngram"] + ["drafts: mtp"] * model.endswith("mtp")
    assert list(happened) == ["warm", "paused", "suspended", "evicted", *drafts]
    for label in ("warm", "paused", "suspended", "evicted", drafts[-1]):
        assert int(happened[label].split()[0]) > 0


def test_a_layer_that_looks_at_the_batch_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LAYER_KINDS, "-", LAYER_KINDS["-"])
    plant_in_company("-", 1)
    assert check("tiny", "--cases", "batch", "lookahead", "--max-requests", "2") == 1
    output = capsys.readouterr().out
    # Layers 1 and 3 are MLPs; the second one is wrong.
    assert "FAIL, batch 2: needle 0, prompt token 1: log probs" in output
    assert "first in layer 3 (MLP) of 4, position 0: hidden states differ by 0.001" in output
    assert output.endswith("FAIL\n")


def test_another_prefix_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look_up = PrefixCache.look_up

    def look_up_beside(cache: PrefixCache, *arguments: Any) -> Any:
        found, entered = look_up(cache, *arguments), cache._block_of.values()
        others = [block for block in entered if block not in found.blocks][: found.length]
        return found._replace(blocks=np.array([*others[:1], *found.blocks[1:]], np.int32))

    monkeypatch.setattr(PrefixCache, "look_up", look_up_beside)
    assert check("tiny", "--cases", "warm", "order") == 1
    output = capsys.readouterr().out
    assert row(output, "warm")[-3] == "2"
    assert "FAIL, warm: needle 0, token 0: " in output
    assert "first in layer 0 (attention) of 4, position " in output
    assert row(output, "another order")[-1] == "0"


EVICT = Scheduler._evict


def evict_and_forget(scheduler: Scheduler, slot: int) -> None:
    """A planted fault."""
    request = scheduler._slots.request_at(slot)
    EVICT(scheduler, slot)
    del request.generated_tokens[:1]


def test_an_eviction_that_loses_a_token_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Scheduler, "_evict", evict_and_forget)
    assert check("tiny", "--cases", "evicted", "paused") == 1
    output = capsys.readouterr().out
    assert "FAIL, evicted: needle " in output
    assert row(output, "paused")[-3] == "0"


def test_many_needles_are_compared_with_their_first_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(check_cases, "MOST_ALONE", 2)
    monkeypatch.setattr(Scheduler, "_evict", evict_and_forget)
    digests = []
    for case in "evicted", "lookahead":
        file = tmp_path / f"{case}.json"
        failed = check("tiny", "--needles", "6", "--json", str(file), "--cases", case)
        output = capsys.readouterr().out
        assert row(output, "batch 2")[0] == "20", "two were alone, ten tokens each"
        if case == "evicted":
            assert failed
            assert int(row(output, "evicted")[0]) > 20
            assert int(row(output, "evicted")[-3]) > 2, "some that were never alone"
        else:
            assert not failed
            assert row(output, "lookahead 2")[0] == "60"
        digests.append(json.loads(file.read_text())["settings"]["digest"])
        assert f"digest of the first answers: {digests[-1]}\n" in output
    # The same needles have the same bits in any process, after whatever other cases.
    assert digests[0] == digests[1]
    assert digest([answer([1], [-1.0])]) != digest([answer([1], [-1.0000001])])


def test_a_mode_of_bits_allows_no_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32 a prompt's chunks round otherwise."""
    judge = check_run._judge
    monkeypatch.setattr(check_run, "_judge", lambda *a: replace(judge(*a), mode="bits"))
    assert check("tiny", "--cases", "chunks", "--needles", "1") == 1
    output = capsys.readouterr().out
    assert "promises equal bits" in output
    assert "first in layer " in output


def answer(tokens: list[int], log_probs: list[float], second: float = -3.0) -> Answer:
    best = [[(token, value), (9, second)] for token, value in zip(tokens, log_probs, strict=True)]
    return Answer(0, tokens, log_probs, None, best)


def test_near_ties_are_explained() -> None:
    alone = answer([1, 2, 3], [-1.0, -2.0, -2.999])
    judge = Judge("fast", torch.bfloat16, 2)
    compared, failure = judge.compare({0: alone}, [answer([1, 2, 9], [-1.0, -2.5, -3.0])])
    assert failure is None
    assert (compared["parted"], compared["near_ties"], compared["differ"]) == (1, 1, 1)
    assert (compared["tokens"], compared["log_probs"], compared["largest"]) == (3, 2, 0.5)
    assert (
        "9 here; log probs -2.999 and -3; the best two logits are 0.001 apart"
        in (compared["first"])
    )
    for other in answer([1, 9], [-1.0, -3.0]), answer([1, 8], [-1.0, -2.0]), answer([1], [-1.0]):
        compared, failure = judge.compare({0: alone}, [other])
        assert failure is not None
        assert (failure.position, compared["failed"], compared["near_ties"]) == (1, 1, 0)
    # Of more equal tokens than are listed the other answer lists others: it knows both.
    unlisted = replace(
        answer([1, 8], [-1.0, -2.0]), likeliest=[[(1, -1.0)], [(8, -2.0), (2, -2.01)]]
    )
    compared, failure = judge.compare({0: alone}, [unlisted])
    assert (failure, compared["near_ties"]) == (None, 1)
    for far, fails in (-2.00001, True), (-2.0000005, False), (float("nan"), True):
        found = answer([1, 2, 3], [-1.0, far, -2.999])
        compared, failure = Judge("float32", torch.float32, 2).compare({0: alone}, [found])
        assert (failure is not None, compared["differ"]) == (fails, 1)


def _check_on_a_rank() -> tuple[int, str]:
    sizes = ["--tensor-model-parallel-size", "2", "--no-progress"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return check("tiny", *sizes, "--cases", "evicted"), output.getvalue()


def test_ranks_agree() -> None:
    told = run_ranks(2, _check_on_a_rank)
    assert [status for status, _ in told] == [0, 0]
    output = "".join(text for _, text in told)
    assert output.count("OK\n") == 1
    assert int(row(output, "evicted")[-2]) > 0


def plant_in_company(kind: str, number: int) -> None:
    """A layer of a kind, by its number among these, heeds the rows of a step."""
    layer, blocks = LAYER_KINDS[kind], dict[int, None]()

    def run(block: Any, stream: Any, view: Any, may_split: bool) -> Any:
        after = layer.run(block, stream, view, may_split)
        blocks[id(block)] = None
        if view.dims.rows > 1 and list(blocks).index(id(block)) == number:
            after.value += 1e-3
        return after

    LAYER_KINDS[kind] = replace(layer, run=run)


def _check_of_experts() -> tuple[int, str]:
    if os.environ["RANK"] == "1":
        plant_in_company("*", 1)
    sizes = ["--expert-model-parallel-size", "2", "--no-progress"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return check("tiny-moe", *sizes, "--cases", "idle", "evicted"), output.getvalue()


def test_a_fault_of_one_replica_is_found() -> None:
    told = run_ranks(2, _check_of_experts)
    assert [status for status, _ in told] == [1, 1]
    output = told[0][1]
    for case in "others idle", "evicted":
        assert f"FAIL, {case} on replica 1: needle " in output
    assert output.count("first in layer 2 (attention) of 4, position 0: hidden states") == 2
    failed = {}
    for line in output.splitlines()[1:6]:
        label, cells = line[:16].rstrip(), line[16:].split()
        failed[label] = cells[6] != "0"
        if label.endswith("idle"):
            assert int(cells[7]) > 0
    assert {label for label in failed if failed[label]} == {"1: others idle", "1: evicted"}
    assert failed.keys() == {
        "0: others idle", "0: evicted", "1: others idle", "1: evicted", "1: as on 0",
    }  # fmt: skip


def test_a_pool_too_small_is_said_in_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("tiny", "--num-kv-blocks", "6") == 2
    assert "lower --tokens, or raise --num-kv-blocks" in capsys.readouterr().err
    small = ["--num-kv-blocks", "1", "--block-size-tokens", "16"]
    assert main(["bench", "latency", "dummy:tiny", *small]) == 2
    assert "lower --output-len, or raise --num-kv-blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "cold"], "--cases cold is none: the cases are batch, "),
        (["--tokens", "1"], "--tokens 1 must be at least 2."),
        (["--seed", "-1"], "--seed -1 must be at least 0."),
        (["--needles", "9" * 12], "--needles 999999999999 must be at most 10,000."),
        (
            ["--tokens", "90000"],
            "--tokens 90000: a prompt of 1 and twice as many tokens as each needle",
        ),
        (["--cases", "idle"], "--cases idle: with this model and these settings there are no such"),
        (["--num-speculative-tokens", "2"], "--num-speculative-tokens: drafts are a case"),
        (["-p", "a text"], "token ids"),
    ],
)
def test_what_cannot_be_checked_is_said(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LLM, "__init__", None)  # none is made
    assert check("tiny", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_cache_in_fp8_is_judged_by_coarser_rounding() -> None:
    """A last bit of float32 can become a step of e4m3."""
    modes = {}
    for dtype in ("fp8", "model"):
        with LLM("dummy:tiny", device="cpu", kv_cache_dtype=dtype) as llm:
            judge = check_run._judge(llm)
            modes[dtype] = judge.mode, judge.dtype
    assert modes == {"fp8": ("fast", torch.bfloat16), "model": ("float32", torch.float32)}
