"""A request whose logits become NaN fails, alone, and says why; the others give their tokens."""

from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams, Status, StructuredOutput
from megatron_async.errors import NoTokenToChoose
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import load_recording
from megatron_async.lab.replay import Replay
from tests.support.harness import (
    EngineFactory,
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    random_prompts,
    run_alone,
)
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.poison import spoil_logits

PROMPTS = random_prompts(3, (30, 5, 17, 9))
POSITION = 41
"""Position of the first token that cannot be chosen; sequences that stay shorter are sound."""
BEFORE = POSITION - len(PROMPTS[0])
"""Tokens that the first prompt's request generates before."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "softmax": {"temperature": 0.9, "seed": 1},
    "filtered": {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": 1},
    "processed": {"repetition_penalty": 1.3, "bad_words": [[3, 4]], "return_log_probs": True},
}


def jobs(**changes: Any) -> list[Job]:
    """The first runs into the damage; the others end before it."""
    return [Job(PROMPTS[0], greedy(40, **changes))] + [
        Job(prompt, greedy(20, **changes)) for prompt in PROMPTS[1:]
    ]


def run(engine: DynamicInferenceEngine, work: list[Job]) -> list[Any]:
    requests = engine.generate([job.prompt for job in work], [job.params for job in work])
    drain(engine)
    assert_all_is_back(engine)
    return requests


@pytest.fixture(scope="module")
def sound(tiny_model: torch.nn.Module) -> dict[str, list[list[int]]]:
    """What the jobs of each kind say, each alone, where nothing is spoilt."""
    engine = make_engine(tiny_model, lookahead=0)
    found = {kind: run_alone(engine, jobs(**changes)) for kind, changes in KINDS.items()}
    engine.close()
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
def test_it_fails_alone(make_tiny_engine, sound, kind: str, lookahead, invalidation):
    work, alone = jobs(**KINDS[kind]), sound[kind]
    engine = make_tiny_engine(lookahead=lookahead, invalidation=invalidation)
    spoil_logits(engine, POSITION)
    failed, *others = run(engine, work)
    assert failed.status == Status.FAILED
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, NoTokenToChoose)
    assert failed.error.position == POSITION
    assert "request 0: no token can be chosen at position 41" in str(failed.error)
    assert "check the model's weights" in str(failed.error)
    assert f"The {BEFORE} tokens generated before are kept" in str(failed.error)
    assert failed.generated_tokens == alone[0][:BEFORE]
    assert [request.generated_tokens for request in others] == alone[1:]
    assert all(request.status == Status.COMPLETED for request in others)
    stats = engine.stats()
    assert stats["failed_requests"] == 1
    assert stats["generated_tokens"] == BEFORE + 3 * 20
    if invalidation == "reconcile":
        assert stats["zombie_rows"] == lookahead
    # The slot serves its next owner as if nothing had been.
    assert run(engine, work[1:])[0].generated_tokens == alone[1]


@pytest.mark.parametrize(
    ("value", "column"), [(torch.inf, 0), (-torch.inf, slice(None)), (torch.nan, slice(None))]
)
def test_other_logits_that_leave_no_token(make_tiny_engine, value: float, column: Any):
    engine = make_tiny_engine(lookahead=1)
    spoil_logits(engine, POSITION, column, value)
    failed, *others = run(engine, jobs())
    assert isinstance(failed.error, NoTokenToChoose)
    assert all(request.error is None for request in others)


def test_the_first_token_of_a_prompt_in_chunks(make_tiny_engine: EngineFactory) -> None:
    """Chunks that leave part of a prompt have no token to choose: their logits do not matter."""
    engine = make_tiny_engine(lookahead=1, max_tokens=16, max_requests=4)
    spoil_logits(engine, POSITION)
    long = random_prompts(5, (70,))[0]
    failed, sound = run(engine, [Job(long, greedy(4)), Job(PROMPTS[1], greedy(20))])
    assert isinstance(failed.error, NoTokenToChoose)
    assert failed.error.position == 70
    assert failed.generated_tokens == []
    assert sound.error is None


def test_a_row_under_a_grammar(make_tiny_engine, lookahead, invalidation: str):
    """Also where the damaged logit is one that the grammar bans."""
    tokenizer = make_ascii_tokenizer()
    params = SamplingParams(
        seed=4, num_tokens_to_generate=60, structured_output=StructuredOutput(regex="[a-f]{70}")
    )
    work = [Job(PROMPTS[0], params), *jobs()[1:]]
    engine = make_tiny_engine(lookahead=0, tokenizer=tokenizer)
    whole = [request.generated_tokens for request in run(engine, work)]
    for column in (7, slice(None)):
        engine = make_tiny_engine(
            lookahead=lookahead, invalidation=invalidation, tokenizer=tokenizer
        )
        spoil_logits(engine, POSITION, column)
        failed, *others = run(engine, work)
        assert isinstance(failed.error, NoTokenToChoose)
        assert failed.generated_tokens == whole[0][:BEFORE]
        assert [request.generated_tokens for request in others] == whole[1:]


def test_a_recorded_run_replays(make_tiny_engine, tmp_path, lookahead):
    engine = make_tiny_engine(lookahead=lookahead)
    spoil_logits(engine, POSITION)
    recorder = Recorder(engine, tmp_path / "run.rec")
    failed, *_ = run(engine, jobs())
    recorder.close()
    replay = Replay(load_recording(tmp_path / "run.rec"))
    replay.run()
    assert replay.engine.stats()["failed_requests"] == 1
    assert failed.error is not None
