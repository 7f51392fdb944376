"""Scores: log probs of given tokens, among running requests, behind cached prefixes, in padded
steps; and the one log softmax of prompts and answers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceRequest, SamplingParams
from megatron_async.devices import CpuDevice
from megatron_async.errors import RequestError, SequenceTooLong
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.requests.request_registry import Status
from tests.support.harness import EngineFactory, drain, greedy, random_prompts

PROMPTS = random_prompts(8, [3, 1, 40, 9, 25, 12], 128)
TOLERANCE = {"rtol": 0, "atol": 1e-4}
DRAWN = SamplingParams(
    temperature=0.7, top_k=30, top_p=0.95, seed=3, num_tokens_to_generate=14, termination_id=-1,
    logit_bias={5: 3.0, 9: -2.0}, return_log_probs=True, skip_prompt_log_probs=True,
    top_n_logprobs=3,
)  # fmt: skip


def sequences(requests: list[DynamicInferenceRequest]) -> tuple[list[list[int]], list[int]]:
    """Prompts with their answers, and where these begin."""
    whole = [[*each.prompt_tokens.tolist(), *each.generated_tokens] for each in requests]
    return whole, [len(each.prompt_tokens) for each in requests]


def check(found: list[DynamicInferenceRequest], wanted: list[DynamicInferenceRequest]) -> None:
    for score, request in zip(found, wanted, strict=True):
        assert (score.status, score.finish_reason) == (Status.COMPLETED, "length"), score.error
        assert (score.generated_tokens, score.generated_log_probs) == ([], [])
        start = score.sampling_params.prompt_log_probs_from
        assert score.weight_versions == [(None, max(start, 1), len(score.prompt_tokens))]
        pairs = [(score.prompt_log_probs, request.generated_log_probs)]
        tops = score.log_probs.prompt_top_n(), request.log_probs.generated_top_n()
        for ours, theirs in zip(*tops, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            pairs.append(([value for _, value in ours], [value for _, value in theirs]))
        for ours, theirs in pairs:
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **TOLERANCE)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_score_is_what_generation_said(
    make_tiny_engine: EngineFactory, lookahead: int, mode: str
) -> None:
    """Chunks of 16 tokens, among requests that run on. Break `OF_SCORES`: processed ones differ."""
    engine = make_tiny_engine(lookahead=lookahead, max_tokens=16, max_requests=8)
    params = DRAWN.copy()
    params.logprobs_mode = mode
    wanted = engine.generate(PROMPTS, params)
    whole, starts = sequences(wanted)
    alone = engine.generate([PROMPTS[3]], greedy(60))[0].generated_tokens
    running = engine.add_request(77, PROMPTS[3], greedy(60))
    for _ in range(3):
        engine.step_modern()
    check(engine.score(whole, starts, params), wanted)
    assert not running.done() or lookahead == 0
    drain(engine)
    assert running.result().generated_tokens == alone
    assert engine.stats()["overlap_ratio"] >= 0.9 * bool(lookahead)


def test_a_cached_prefix_before_the_start_is_used(
    make_tiny_engine: EngineFactory, lookahead: int
) -> None:
    """Break `PrefixCache._most`: leave a prompt's missing log probs out of it."""
    engine = make_tiny_engine(lookahead=lookahead, enable_prefix_caching=True, block_size_tokens=4)
    wanted = engine.generate([PROMPTS[2]] * 3, greedy(20, return_log_probs=True, top_n_logprobs=2))
    whole, starts = sequences(wanted)
    params = SamplingParams(top_n_logprobs=2)
    found = engine.score(whole, starts, params)
    check(found, [*wanted])
    # Of 40 tokens the last one's hidden state makes the first log prob.
    assert [each.num_cached_tokens for each in found] == [36, 36, 36]
    for start, cached in (0, 0), (1, 0), (4, 0), (5, 4), (59, 56):
        score = engine.score([whole[0]], start, params)[0]
        assert score.num_cached_tokens == cached
        everything = [*wanted[0].prompt_log_probs, *wanted[0].generated_log_probs]
        torch.testing.assert_close(
            torch.tensor(score.prompt_log_probs), torch.tensor(everything)[max(start, 1) - 1 :],
            **TOLERANCE,
        )  # fmt: skip


def test_an_answer_after_log_probs_of_half_a_prompt(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(enable_prefix_caching=True, block_size_tokens=8)
    first = engine.generate([PROMPTS[2]], greedy(9, return_log_probs=True))[0]
    asks = greedy(9, return_log_probs=True, prompt_log_probs_from=20)
    second = engine.generate([PROMPTS[2]], asks)[0]
    assert second.num_cached_tokens == 16
    assert second.generated_tokens == first.generated_tokens
    assert second.prompt_log_probs == pytest.approx(first.prompt_log_probs[19:], abs=1e-4)


def test_limits(make_tiny_engine: EngineFactory) -> None:
    """Break `num_to_prefill`: the last token of a sequence is prefilled, and has no place."""
    engine = make_tiny_engine(max_sequence_length=64, block_size_tokens=8, num_kv_blocks=8)
    longest = (PROMPTS[2] * 2)[:64]
    score = engine.score([longest])[0]
    assert len(score.prompt_log_probs) == 63, score.error
    too_long = engine.score([[*longest, 3]])[0].error
    assert isinstance(too_long, SequenceTooLong)
    assert "must hold it:" in str(too_long)
    small = make_tiny_engine(max_sequence_length=64, block_size_tokens=8, num_kv_blocks=2)
    assert len(small.score([longest[:17]])[0].prompt_log_probs) == 16  # its last token has no place
    assert small.score([longest[:18]])[0].failed()
    one, nothing = engine.score([[5]])[0], engine.generate([[5, 6]], greedy(0, echo=True))[0]
    assert (one.prompt_log_probs, one.finish_reason) == ([], "length")
    assert (nothing.prompt_log_probs, nothing.generated_tokens) == (None, [])
    assert engine.score([[5, 6]], start=1)[0].succeeded()
    rollouts = SamplingParams(min_tokens=3, num_tokens_to_generate=9)
    assert engine.score([[5, 6]] * 2, torch.tensor([0, 1]).numpy(), rollouts)[1].succeeded()
    for bad, field in ((2, "prompt_log_probs_from=2"), (-1, "prompt_log_probs_from=-1")):
        assert field in str(engine.score([[5, 6]], start=bad)[0].error)
    with pytest.raises(RequestError, match="2 starts were given for 1 sequences"):
        engine.score([[5, 6]], [1, 1])
    for name, value in ("frequency_penalty", 0.5), ("bad_words", [[3]]):
        params = SamplingParams(logprobs_mode="processed", **{name: value})
        assert name in str(engine.score([[5, 6]], 0, params)[0].error)
        params.logprobs_mode = "raw"
        assert engine.score([[5, 6]], 0, params)[0].succeeded()
    drain(engine)  # reports those that ended at once
    drain(small)


def test_prompts_and_answers_have_one_log_softmax(
    make_tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_tiny_engine()
    op, rows = engine.context.gpu_view.ops.log_probs, []

    def counted(logits: torch.Tensor, *rest: Any) -> None:
        rows.append(len(logits))
        op(logits, *rest)

    monkeypatch.setattr(engine.context.gpu_view.ops, "log_probs", counted)
    monkeypatch.setattr(torch, "log_softmax", lambda *given: pytest.fail("another one"))
    engine.generate([PROMPTS[2]], greedy(1, return_log_probs=True))
    assert rows == [1, 39]


class Replaying(CpuDevice):
    """Captures by running again."""

    captures_graphs = True

    def capture(self, work: Any) -> Any:
        self.compute.launch(work)
        return SimpleNamespace(replay=work)


def test_steps_with_scores_are_captured(
    make_tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a padded, packed shape, and hidden states that a graph could have left; a CPU's
    attention knows no such shape. Break `compute`: read `step.token_ids` of the view."""
    monkeypatch.setattr(TorchPagedAttention, "captures_prefill", True)
    # What it does not write of such a shape must be finite, or request 9 fails.
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    settings = {"max_tokens": 64, "mixed_step_tokens": 64, "choices": "shipped", "lookahead": 0}
    engine = make_tiny_engine(device=Replaying(), **settings)
    controller, context = engine.controller, engine.context
    assert controller.graphs.hidden
    engine.add_request(9, [1, 2, 3], greedy(5))
    engine.step_modern()
    engine.add_request(1, PROMPTS[4], SamplingParams().scoring(11))
    engine.add_request(2, PROMPTS[3], SamplingParams().scoring())
    plan = context.prepare_step()
    assert plan.dims.is_captured
    assert plan.dims.is_packed
    assert plan.num_decode == 1
    assert plan.dims.graph_key in controller.graphs.hidden
    controller._ring[0].prompt.allocate()
    context.transfer_bookkeeping_to_gpu(plan)
    controller.device.upload.launch(lambda: None)
    done = controller.device.event()
    controller.device.upload.record(done)
    done.wait()
    hidden = torch.randn(plan.dims.tokens, 32, generator=torch.Generator().manual_seed(0))
    controller._prompt.compute(plan, hidden)
    logits = controller.inference_wrapped_model.project(hidden).log_softmax(dim=-1)
    first, wanted = 1, []
    for prompt, start in (PROMPTS[4], 11), (PROMPTS[3], 1):
        for place in range(start, len(prompt)):
            wanted.append(float(logits[first + place - 1, prompt[place]]))
        first += len(prompt) - 1
    entry = controller._prompt.ring[plan.step % len(controller._prompt.ring)]
    found = entry.source.view(torch.float32)[: len(wanted), 0]
    torch.testing.assert_close(found, torch.tensor(wanted), **TOLERANCE)
    engine.close()
