"""Drafts on ranks that share experts, where one rank's rows are narrower than the step: called on
both ranks, each with requests of its own."""

import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.checkpoints import open_model
from megatron_async.devices import CudaDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.planning.step_plan import StepPlan, StepShape
from megatron_async.ranks.join_group import join_group
from tests.support.capturing_cpu import CapturingCpu
from tests.support.drafters import DRAFTERS
from tests.support.harness import CPU, Job, assert_all_is_back, greedy, make_engine, random_prompts

TINY_EXPERTS = ModelArchitecture(
    "mixtral", 2, 32, 4, 2, 16, 64, 128, max_position_embeddings=1024,
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24,
)  # fmt: skip
DRAFTS = 3
ENOUGH = 40
"""Tokens of the answers that the drafters know: more than any request asks for."""
LOOKAHEADS = (0, 1, 2)
_PLAIN: dict[str, Any] = {"num_tokens_to_generate": 24, "termination_id": -1}
_KINDS: list[SamplingParams] = [
    greedy(30),
    SamplingParams(temperature=1.0, **_PLAIN),
    SamplingParams(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.3, **_PLAIN),
    greedy(17, return_log_probs=True),
]
_PROMPTS = random_prompts(9, (5, 19, 1, 33, 8, 12, 26, 3, 40, 2), TINY_EXPERTS.vocab_size)
JOBS = [
    Job(prompt, replace(_KINDS[number % len(_KINDS)], seed=number))
    for number, prompt in enumerate(_PROMPTS)
]
"""A job's number is its seed, by which drafters know it."""
NUMBERS = ((0, 1, 2, 3), (8, 5, 6, 7, 4, 9))
"""Numbers of each rank's jobs. The second begins with a prompt of two chunks: while it is
prefilled, the first rank drafts already."""
SETTINGS: tuple[dict[str, Any], ...] = ({"num_kv_blocks": 80}, {"num_kv_blocks": 19})
"""The second rank's blocks run short, so that its rows do without drafts."""
SHARED: dict[str, Any] = {
    "block_size_tokens": 4, "max_requests": 4, "max_tokens": 24, "max_sequence_length": 72,
}  # fmt: skip


class SeenStep(NamedTuple):
    """A launched step."""

    agreed_width: int
    """Width of the shape that the ranks agreed on."""
    dims_width: int
    is_captured: bool
    width: int
    """Width of this rank's plan."""
    decode_rows: int
    chunks: int


class StepLog:
    """Looks at the steps that an engine launches in its group."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.steps: list[SeenStep] = []
        self._agreed = StepShape()
        self._agree, self._launch = engine.group.agree, engine.controller.enqueue_step
        engine.group.agree = self.agree  # type: ignore[method-assign]
        engine.controller.enqueue_step = self.launch_step  # type: ignore[method-assign]

    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        """`RankGroup.agree`."""
        self._agreed = self._agree(step, wanted, has_work)
        return self._agreed

    def launch_step(self, plan: StepPlan) -> Any:
        """`TextGenerationController.enqueue_step`."""
        self.steps.append(
            SeenStep(
                self._agreed.width, plan.dims.width, plan.dims.is_captured, plan.width,
                plan.num_decode, plan.num_rows - plan.num_decode,
            )
        )  # fmt: skip
        return self._launch(plan)


class RankRun(NamedTuple):
    """What a rank's engine did."""

    tokens: list[list[int]]
    log_probs: list[list[float] | None]
    steps: list[SeenStep]
    accepted: int
    """Draft tokens."""


def answers(engine: DynamicInferenceEngine) -> tuple[list[list[int]], list[Any]]:
    """What serial plain decoding says: whole sequences of `ENOUGH` tokens, and the requests as they
    are asked for."""
    sequences, requests = [], []
    for job in JOBS:
        endless = replace(job.params, num_tokens_to_generate=ENOUGH)
        sequences.append([*job.prompt, *engine.generate([job.prompt], endless)[0].generated_tokens])
        requests.append(engine.generate([job.prompt], job.params)[0])
    return sequences, requests


def drafting(
    folder: str, drafter: str, sequences: list[list[int]], on_gpus: bool = False
) -> list[RankRun]:
    """This rank's jobs, by lookahead."""
    rank, source = int(os.environ["RANK"]), open_model(folder)
    place = torch.device("cuda", rank) if on_gpus else CPU
    sizes = ParallelSizes(expert_model_parallel=2)
    model = build_model(source.architecture, torch.float32, place, sizes=sizes)
    source.load_weights(model)
    jobs = [JOBS[number] for number in NUMBERS[rank]]
    runs = []
    for lookahead in LOOKAHEADS:
        engine = make_engine(
            model, device=CudaDevice(rank) if on_gpus else CapturingCpu(),
            drafter=DRAFTERS[drafter](sequences, TINY_EXPERTS.vocab_size),
            num_speculative_tokens=DRAFTS, lookahead=lookahead, **SHARED, **SETTINGS[rank],
        )  # fmt: skip
        engine.loop.join(join_group(check_agreement=False)[0])
        log = StepLog(engine)
        found = engine.generate([job.prompt for job in jobs], [job.params for job in jobs])
        assert all(request.error is None for request in found)
        while engine.in_flight:
            engine.step_modern()
        tokens = [list(request.generated_tokens) for request in found]
        log_probs = [request.generated_log_probs for request in found]
        accepted = int(engine.stats()["accepted_tokens"])
        runs.append(RankRun(tokens, log_probs, log.steps, accepted))
        engine.close()
        assert_all_is_back(engine)
    return runs
