"""NVTX ranges as a profiler is told of them, in processes of their own: every stage of every step,
on every rank, lies in a range that names the step."""

import asyncio
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_async import LLM, DynamicInferenceEngine, StructuredOutput
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import ConfigurationError
from megatron_async.observe.tracer import Tracer
from megatron_async.planning.step_plan import StepPlan
from tests.support.capturing_cpu import CapturingCpu
from tests.support.drafters import DRAFTERS
from tests.support.harness import drain, greedy, make_engine, make_model
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.nvtx_log import NvtxLog, injection, read_log
from tests.support.ranks import run_ranks

PARTS = ["forward_pass", "sampling", "feed_back"]
DEVICE = ["device_step", *(f"device_step/{part}" for part in PARTS)]
LAUNCH = ["transfer_bookkeeping_to_gpu", "launch_step"]
BOOKING = ["resolve", "update_requests", "emit"]


class Step(NamedTuple):
    """A launched step."""

    number: int
    decode_rows: int
    chunks: int

    @property
    def text(self) -> str:
        """Text of the range around what a thread does for the step."""
        kinds = {(False, False): "Dummy", (True, False): "Decode", (False, True): "Prefill"}
        kind = kinds.get((self.decode_rows > 0, self.chunks > 0), "Mixed")
        return f"{kind} step {self.number} rows {self.decode_rows + self.chunks}"


class Launches(EngineListener):
    """Keeps what is launched."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.steps: list[Step] = []
        engine.listeners.append(self)

    def launching(self, plan: StepPlan) -> None:
        chunks = len(plan.prefill_starts) - 1
        self.steps.append(Step(plan.step, plan.num_rows - chunks, chunks))


class Seen(NamedTuple):
    """What a rank did."""

    process: int
    steps: list[Step]
    agreement_us: float
    constrained: list[Step] | None = None
    """Steps of a request with a grammar."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvtx")


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    return injection(folder)


def work_for(log: NvtxLog, step: Step) -> list[list[str]]:
    """Paths inside each range that names a step, by their starts; sorted."""
    found: dict[int, list[str]] = {}
    outer = [each for each in log.ranges if each.path == (step.text,)]
    for each in log.ranges:
        if each.path[0] == step.text and len(each.path) > 1:
            (place,) = (
                place
                for place, around in enumerate(outer)
                if around.thread == each.thread and around.start < each.start < around.end
            )
            found.setdefault(place, []).append("/".join(each.path[1:]))
    assert len(found) == len(outer), "one of them is empty"
    return sorted(found.values())


def check_planning(log: NvtxLog, steps: list[Step], agrees: bool) -> None:
    """Every step is planned in a range of its own, in which ranks agree."""
    for step in steps:
        plan = f"Plan step {step.number}"
        inside = [each.path for each in log.ranges if each.path[0] == plan]
        assert (plan, "prepare_step") in inside
        assert ((plan, "prepare_step", "agree_shape") in inside) == agrees


def check_every_stage_is_of_a_step(log: NvtxLog) -> None:
    outer = {each.path[0].split(" step ")[0] for each in log.ranges}
    assert outer <= {"Plan", "Prefill", "Decode", "Mixed", "Dummy"}


def _alone() -> Seen:
    """A prompt of two chunks arrives beside a decode row; then a captured engine with drafts, and
    one without NVTX."""
    model, pool = make_model(), {"max_requests": 4, "num_kv_blocks": 16, "block_size_tokens": 16}
    engine = make_engine(model, nvtx=True, lookahead=1, max_tokens=16, **pool)
    launches = Launches(engine)
    engine.add_request(0, [1, 2, 3], greedy(6))
    engine.step_modern()
    engine.step_modern()
    engine.add_request(1, list(range(20)), greedy(2, return_log_probs=True))
    drain(engine)
    engine.close()
    torch.cuda.nvtx.mark("captured")
    drafter = DRAFTERS["oracle"]([[*range(40)]], 128)
    engine = make_engine(
        model, nvtx=True, device=CapturingCpu(), drafter=drafter, num_speculative_tokens=2, **pool
    )
    torch.cuda.nvtx.mark("is captured")
    engine.generate([[5, 6]], greedy(6))
    engine.close()
    torch.cuda.nvtx.mark("awaited")
    engine = make_engine(model, nvtx=True, **pool)

    async def serve() -> None:
        engine.add_request(0, [1, 2, 3], greedy(4))
        while engine.has_unfinished_requests():
            await engine.async_step()

    asyncio.run(serve())
    engine.close()
    torch.cuda.nvtx.mark("constrained")
    engine = make_engine(model, nvtx=True, tokenizer=make_ascii_tokenizer(), **pool)
    grammar = Launches(engine)
    engine.generate([[5, 6]], greedy(4, structured_output=StructuredOutput(regex="[a-c]{4}")))
    engine.close()
    torch.cuda.nvtx.mark("off")
    engine = make_engine(model, device=CapturingCpu(), **pool)
    engine.generate([[5, 6]], greedy(6))
    engine.close()
    return Seen(os.getpid(), launches.steps, engine.stats()["agreement_us"], grammar.steps)


def test_every_stage_of_every_step_lies_in_a_range_that_names_the_step(folder, environment):
    (seen,) = run_ranks(1, _alone, environment=environment)
    whole = read_log(folder, seen.process)
    log, captured = whole.until("captured"), whole.since("is captured").until("awaited")
    kinds = [step.text.split()[0] for step in seen.steps]
    assert [kinds[0], *sorted(set(kinds))] == ["Prefill", "Decode", "Mixed", "Prefill"]
    check_every_stage_is_of_a_step(log)
    check_planning(log, seen.steps, agrees=False)
    for step in seen.steps:
        work = work_for(log, step)
        if ["transfer_samples_to_cpu"] in work:  # log probs are copied
            work.remove(["transfer_samples_to_cpu"])
        assert work == sorted([LAUNCH, DEVICE, BOOKING])
    assert "transfer_samples_to_cpu" in {each.text for each in log.ranges}
    assert {each.text for each in log.marks} == {f"{part}_ends" for part in PARTS}
    # A graph's replay runs no Python, but what it has captured marks the ends of its parts.
    replays = [each for each in captured.ranges if each.text == "device_step"]
    assert len(replays) > 3
    for replay in replays:
        ends = [
            mark.text for mark in captured.marks
            if mark.thread == replay.thread and replay.start < mark.start < replay.end
        ]  # fmt: skip
        assert ends == [f"{part}_ends" for part in (*PARTS, "drafting")]
    awaited = whole.since("awaited").until("constrained")
    check_every_stage_is_of_a_step(awaited)
    assert awaited.awaited == []
    waits = [each.path for each in awaited.ranges if each.text == "resolve"]
    assert len(waits) > 3
    assert {len(path) for path in waits} == {2}
    constrained = whole.since("constrained").until("off")
    check_every_stage_is_of_a_step(constrained)
    works = [work_for(constrained, step) for step in seen.constrained]
    # Each of the four tokens is sampled when the one before is booked.
    assert sum(["send_masks"] in work and ["sampling"] in work for work in works) >= 4
    assert whole.since("off") == ([], [], [])
    assert seen.agreement_us == 0


def _over_ranks(model: str, options: dict[str, Any]) -> Seen:
    """The first replica has a longer answer than the second."""
    with LLM(model, device="cpu", num_kv_blocks=8, nvtx=True, **options) as llm:
        launches, tokens = Launches(llm.engine), 5 - 3 * llm.data_parallel_rank
        llm.generate([[1, 2, 3]], greedy(tokens))
        return Seen(os.getpid(), launches.steps, llm.engine.stats()["agreement_us"])


def test_ranks_that_share_experts_and_their_followers(folder, environment):
    """Two replicas of two ranks. The second one's requests end earlier: its last steps are dummies,
    planned by the leader and repeated by its follower."""
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    ranks = run_ranks(4, _over_ranks, "dummy:tiny-moe", sizes, environment=environment)
    for rank, seen in enumerate(ranks):
        leads, log = rank % 2 == 0, read_log(folder, seen.process)
        kinds = [step.text.split()[0] for step in seen.steps]
        assert kinds[:2] == ["Prefill", "Decode"]
        assert ("Dummy" in kinds) == (rank >= 2)
        assert (seen.agreement_us > 0) == leads
        check_every_stage_is_of_a_step(log)
        check_planning(log, seen.steps, agrees=leads)
        for step in seen.steps:
            assert work_for(log, step) == sorted([LAUNCH, DEVICE, BOOKING])


def test_pipeline_stages(folder, environment):
    sizes = {"pipeline_model_parallel_size": 2}
    ranks = run_ranks(2, _over_ranks, "dummy:tiny", sizes, environment=environment)
    on_device = (
        ["device_step", "device_step/forward_pass", "send_hidden_states"],
        ["receive_hidden_states", *DEVICE],
    )
    back = ["return_samples"], ["transfer_samples_to_cpu"]
    for seen, device in zip(ranks, on_device, strict=True):
        log = read_log(folder, seen.process)
        check_every_stage_is_of_a_step(log)
        for step in seen.steps:
            assert work_for(log, step) == sorted([LAUNCH, device, BOOKING, *back])


def test_a_torch_without_nvtx_is_refused(monkeypatch):
    monkeypatch.delattr(torch._C, "_nvtx")
    device = CapturingCpu()
    with pytest.raises(ConfigurationError, match="nvtx=True needs a CUDA build of torch"):
        Tracer(device, nvtx=True)
    device.close()
