"""Drafts on several ranks: called on every rank, with the same requests."""

from dataclasses import replace
from typing import Any

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest
from megatron_async.devices.cpu import Chaos, CpuDevice
from tests.support.draft_watches import NgramWatch
from tests.support.drafters import DRAFTERS
from tests.support.harness import Job, assert_all_is_back, drain, greedy, make_engine
from tests.support.pipeline_scenarios import GRAMMARS, JOBS, PROMPTS, letter_tokenizer, stage_model

VOCABULARY = 128
ENOUGH = 24
"""Tokens beyond any end, which the drafters know too."""
REPEATING = [Job([7, 9, 4], greedy(31, logit_bias={token: 100.0})) for token in (3, 8)]
"""Texts that say one token again and again."""
SEEDED = [
    Job(job.prompt, replace(job.params, seed=number))
    for number, job in enumerate(
        [
            *JOBS,
            *(Job(p, g) for p, g in zip(PROMPTS, GRAMMARS, strict=False)),
            *JOBS[:3],
            *REPEATING,
        ]
    )
]
"""A job's number is its seed, by which drafters know it. Ends by stop tokens and by lengths inside
rows, log probs, penalties, bad words, rows under a grammar among them."""
ABORTED = {1: 6, 5: 9, 4: 12}
"""Jobs that are aborted, and the steps of it."""
ROOMY: dict[str, Any] = {"max_requests": 4, "max_tokens": 40, "num_kv_blocks": 64}
"""Fewer slots than requests: they change hands while rows of their former owners are in flight."""
SCARCE: dict[str, Any] = {
    "max_requests": 6, "max_tokens": 30, "num_kv_blocks": 16, "block_size_tokens": 4,
    "max_sequence_length": 64,
}  # fmt: skip
RUNS: list[tuple[int, str, int, dict[str, Any]]] = [
    (0, "oracle", 3, ROOMY),
    (1, "fickle", 1, ROOMY),
    (2, "oracle", 1, ROOMY),
    (3, "fickle", 3, ROOMY),
    (2, "fickle", 3, SCARCE),
    (3, "oracle", 3, SCARCE),
    (1, "ngram", 3, ROOMY),
    (3, "ngram", 2, SCARCE),
]
"""Lookahead, drafter, drafts, settings."""


def play(engine: DynamicInferenceEngine) -> list[dict[str, Any]]:
    """What becomes of the jobs: two arrive at the start, then one with each second step."""
    for job in SEEDED:  # each rank schedules for itself: none may wait for a grammar
        if job.params.structured_output is not None:
            engine.grammars.begin(job.params.structured_output).result()
    futures: list[Any] = []
    step = 0
    while len(futures) < len(SEEDED) or engine.has_unfinished_requests():
        if len(futures) < len(SEEDED) and step % 2 == 0:
            job = SEEDED[len(futures)]
            futures.append(engine.add_request(len(futures), job.prompt, job.params))
        for number, at in ABORTED.items():
            if step == at and number < len(futures) and not futures[number].done():
                engine.abort_request(number)
        engine.step_modern()
        step += 1
    drain(engine)
    return [outcome(future.result()) for future in futures]


def outcome(request: DynamicInferenceRequest) -> dict[str, Any]:
    """What is compared."""
    return {
        "tokens": request.generated_tokens,
        "reason": request.finish_reason,
        "log probs": request.generated_log_probs,
    }


def plain() -> tuple[list[dict[str, Any]], list[list[int]]]:
    """What one serial rank says without drafts and aborts, and what jobs would say if nothing but a
    grammar ended them."""
    model, tokenizer = stage_model(1), letter_tokenizer()
    engine = make_engine(model, tokenizer=tokenizer, lookahead=0, max_requests=16)
    prompts, params = zip(*((job.prompt, job.params) for job in SEEDED), strict=True)
    found = engine.generate(list(prompts), list(params))
    endless = [
        replace(each, num_tokens_to_generate=ENOUGH, stop_token_ids=None, min_tokens=0)
        for each in params
    ]
    answers = engine.generate(list(prompts), endless)
    engine.close()
    pairs = zip(prompts, answers, strict=True)
    sequences = [[*prompt, *answer.generated_tokens] for prompt, answer in pairs]
    return [outcome(each) for each in found], sequences


def drafting(stages: int, answers: list[list[int]]) -> list[tuple[list[dict[str, Any]], Any]]:
    """Outcomes and counters of `RUNS` on this rank."""
    model, tokenizer, found = stage_model(stages), letter_tokenizer(), []
    for lookahead, drafter, count, settings in RUNS:
        is_ours = drafter == "ngram"
        engine = make_engine(
            model, tokenizer=tokenizer, device=CpuDevice(Chaos(lookahead, 0.2, 0.001)),
            drafter=None if is_ours else DRAFTERS[drafter](answers, VOCABULARY),
            speculative_method=drafter if is_ours else None, num_speculative_tokens=count,
            lookahead=lookahead, **settings,
        )  # fmt: skip
        watch = NgramWatch(engine) if is_ours else None
        outcomes = play(engine)
        stats = {**engine.stats(), "ngram_drafts": 0 if watch is None else watch.found}
        found.append((outcomes, stats))
        engine.close()
        assert_all_is_back(engine)
    return found
