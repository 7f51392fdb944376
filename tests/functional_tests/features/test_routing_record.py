"""Routing records: of every position the experts that its first computation had."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams as MegatronParams
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_async import LLM, DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from megatron_async.device_state.kv_cache import RoutingShape
from megatron_async.devices import Chaos, CpuDevice, CudaDevice
from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.moe import TopKRouter
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.step.routing_recorder import RoutingRecorder
from tests.support.attention_model import AttentionModel
from tests.support.capturing_cpu import CapturingCpu
from tests.support.compat_models import engine_of, gpt_model, logits_of
from tests.support.compat_trio import compat_engine
from tests.support.drafters import Fickle
from tests.support.harness import drain, greedy, make_engine, make_model, random_prompts
from tests.support.ranks import run_ranks
from tests.support.schedules import MAX_STEPS, serial_tokens, sharing_schedule
from tests.support.whole_sequence import whole_logits

EXPERTS = ModelArchitecture(
    "mixtral", 2, 32, 4, 2, 8, 64, 128, max_position_embeddings=1024,
    num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24,
)  # fmt: skip
RECORDS = {"enable_routing_replay": True}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(EXPERTS)


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """The model again, for passes over whole sequences, in which routers tell what they choose."""
    return make_model(EXPERTS)


def recomputed(plain: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """The routing of a whole sequence, nothing cached: `[tokens, layers, topk]`."""
    found: list[Tensor] = []
    routers = [each for each in plain.modules() if isinstance(each, TopKRouter)]
    hooks = [
        each.register_forward_hook(lambda _module, _inputs, out: found.append(out.experts))
        for each in routers
    ]
    whole_logits(plain, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


def check(plain: torch.nn.Module, request: DynamicInferenceRequest) -> None:
    """The record of a request that has ended is what its sequence gives."""
    tokens = [*request.prompt_tokens.tolist(), *request.generated_tokens]
    record = request.routing_indices
    assert request.routing.is_ready
    if request.finish_reason == "aborted":
        if record is None:
            return
        assert 0 < len(record) < len(tokens)
    else:
        assert len(record) == len(tokens) - 1
    assert record.dtype == np.uint8
    assert (record == recomputed(plain, tokens)[: len(record)]).all()


def play(engine: Any, schedule: Any) -> list[DynamicInferenceRequest]:
    """The requests of a schedule, run to their ends."""
    futures: dict[int, Any] = {}
    for step in range(MAX_STEPS):
        for number in schedule.arrivals.pop(step, ()):
            job = schedule.jobs[number]
            futures[number] = engine.add_request(number, job.prompt, job.params)
        for number in schedule.aborts.pop(step, ()):
            if number in futures and not futures[number].done():
                engine.abort_request(number)
        if not schedule.arrivals and not engine.has_unfinished_requests():
            break
        engine.step_modern()
    return [future.result() for future in futures.values()]


@pytest.fixture(scope="module")
def serial_engine(model) -> Iterator[DynamicInferenceEngine]:
    engine = make_engine(model, lookahead=0, max_requests=16)
    yield engine
    engine.close()


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_records_are_what_the_sequences_give(model, plain, serial_engine, lookahead):
    """Under chunks, prefixes that are found, pauses, evictions, aborts, and drafts that are
    accepted or not."""
    events = dict.fromkeys(("evictions", "prefix_cache_hits", "accepted_tokens"), 0)
    for seed in range(lookahead * 6, lookahead * 6 + 6):
        drafts = 2 * (seed % 2)
        schedule = sharing_schedule(seed, 1 + drafts)
        drafter = None
        if drafts:
            answers = serial_tokens(serial_engine, schedule)
            known = [[*job.prompt, *said] for job, said in zip(schedule.jobs, answers, strict=True)]
            drafter = Fickle(known, EXPERTS.vocab_size)
        settings = {**schedule.config, "lookahead": lookahead, "num_speculative_tokens": drafts}
        device = CpuDevice(Chaos(seed, probability=0.2, max_delay_s=0.001))
        engine = make_engine(model, device=device, drafter=drafter, **settings, **RECORDS)
        for request in play(engine, schedule):
            check(plain, request)
        for event in events:
            events[event] += int(engine.stats()[event])
        engine.close()
    assert min(events.values()) > 0, events


def test_captured_steps_are_recorded(model, plain):
    """Padded rows leave no trace, and steps that are replayed write theirs."""
    engine = make_engine(model, device=CapturingCpu(), **RECORDS)
    prompts = random_prompts(1, (3, 40, 11))
    for request in engine.generate(prompts, greedy(9)):
        check(plain, request)


def test_layers_that_draft_are_not_recorded():
    """A layer of multi-token prediction has experts of its own."""
    shape = replace(EXPERTS, mtp_num_depths=1, mtp_pattern="*E")
    engine = make_engine(make_model(shape, with_mtp=True), speculative_method="mtp", **RECORDS)
    plain = make_model(shape, with_mtp=True)
    for request in engine.generate(random_prompts(4, (3, 18)), greedy(12)):
        check(plain, request)
    assert engine.stats()["drafted_tokens"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_gpu_records_what_the_cpu_recomputes(lookahead):
    """Captured steps, the op of few tokens, drafts, and a pool that is too small; in float32, of
    which another order of sums may turn a choice in a thousand."""
    device, shape = CudaDevice(0), DUMMY_SHAPES["tiny-moe"]
    model, plain = make_model(shape, device.torch_device), make_model(shape)
    settings = {"block_size_tokens": 16, "num_kv_blocks": 18, "max_tokens": 60, "max_requests": 12}
    engine = make_engine(
        model, device=device, lookahead=lookahead, speculative_method="ngram", **settings, **RECORDS
    )
    prompts = random_prompts(1, (1, 5, 33, 64, 17, 100, 2, 48))
    wrong = rows = 0
    for request in engine.generate(prompts, greedy(40)):
        tokens = [*request.prompt_tokens.tolist(), *request.generated_tokens]
        record = request.routing_indices
        assert len(record) == len(tokens) - 1
        wrong += int((record != recomputed(plain, tokens)[:-1]).any(2).sum())
        rows += record.shape[0] * record.shape[1]
    engine.close()
    assert wrong <= rows / 500, (wrong, rows)


class CountingModel(AttentionModel):
    """Sends tokens to the expert of the pass's number: a record tells which pass a row is of."""

    passes = 0

    def forward(self, token_ids: Tensor, *args: Any, inference_context: Any, **rest: Any) -> Tensor:
        logits = super().forward(token_ids, *args, inference_context=inference_context, **rest)
        if inference_context.routing is not None:
            number = torch.full((token_ids.size(1), 3), self.passes, dtype=torch.int32)
            inference_context.routing.experts[-1] = Routing(number, number.float()).experts
        self.passes += 1
        return logits


def passes_of(request: DynamicInferenceRequest) -> list[int]:
    return request.routing_indices[:, 0, 0].tolist()


def counting_engine(**settings: Any) -> Any:
    return make_engine(CountingModel(), block_size_tokens=4, lookahead=0, **RECORDS, **settings)


def test_the_first_computation_counts():
    """A prefill after the cache was given back replaces nothing; a prefix that is found has the
    rows of its writer; what a caller has recomputed replaces, and is told."""
    engine = counting_engine(max_requests=4)
    future = engine.add_request(0, [1, 2, 3, 4, 5, 6], greedy(6))
    for _ in range(3):
        engine.step_modern()
    engine.suspend(free_kv_cache=True)
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    first = future.result()
    # Pass 3 feeds what passes 0 to 2 were fed, again, and the last token before the stop.
    assert passes_of(first) == [0] * 6 + [1, 2, 3, 4, 5]
    assert first.routing.replacements == 0
    (second,) = engine.generate([[1, 2, 3, 4, 5, 6]], greedy(2))
    assert second.num_cached_tokens == 4
    assert passes_of(second) == [3] * 4 + [6, 6, 7]

    future = engine.add_request(0, [9, 8, 7], greedy(4))
    engine.step_modern()
    engine.context.evict_all()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert passes_of(future.result()) == [9] * 4 + [10, 11]
    assert future.result().routing.replacements == 1


class NoWeights:
    """A round of weights that changes none."""

    num_bytes = 0

    def commit(self) -> bool:
        return False

    def drop(self) -> None:
        pass


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
def test_an_update_of_weights_keeps_or_replaces(policy):
    """A prompt that is half computed begins again in any case."""
    engine = counting_engine(max_requests=2, max_tokens=6)
    running = engine.add_request(0, [1, 2, 3], greedy(8))
    for _ in range(3):
        engine.step_modern()
    waiting = engine.add_request(1, [*range(10, 20)], greedy(3))
    engine.step_modern()  # pass 3: a token of one, 5 of the other's 10
    engine.updating.stage(1, NoWeights())
    engine.updating.commit(1, "new", policy)
    while engine.has_unfinished_requests():
        engine.step_modern()
    first, second = running.result(), waiting.result()
    found = passes_of(first)
    if policy == "recompute":
        assert first.routing.replacements == 1
        assert min(found) == 4
        assert len(found) == 10
    else:
        assert found[:6] == [0] * 3 + [1, 2, 3]
        assert len(found) == (10 if policy == "keep" else 6)
        assert first.routing.replacements == 0
    assert min(passes_of(second)) >= 4
    assert second.routing.replacements == 1


def test_a_failed_step_spoils_no_record(model, plain):
    engine = make_engine(model, lookahead=2, max_requests=4, **RECORDS)
    compute, calls = engine.controller._compute_step, iter(range(100))

    def fail_once(*args: Any) -> None:
        if next(calls) == 4:
            raise ValueError("planned")
        compute(*args)

    engine.controller._compute_step = fail_once
    prompts = random_prompts(5, (3, 20, 9))
    late = engine.add_request(7, prompts[1], greedy(12))
    for _ in range(2):
        engine.step_modern()
    failed = engine.add_request(8, prompts[0], greedy(20))
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert failed.result().routing_indices is None or failed.result().error is None
    (after,) = engine.generate(prompts[2:], greedy(5))
    for request in (late.result(), failed.result(), after):
        if request.error is None:
            check(plain, request)


def test_no_record_is_kept_unless_asked_for(model):
    engine = make_engine(model)
    (request,) = engine.generate([[1, 2]], greedy(3))
    assert engine.context.gpu_view.kv_cache.block_routing is None
    assert engine.controller.routing is None
    assert request.routing_indices is None
    assert RoutingShape(2, 2, 256).dtype == torch.uint8
    assert RoutingShape(48, 8, 257).num_bytes == 2 * 48 * 8


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ConfigurationError, match="no layers with experts: leave it out"):
        make_engine(make_model(), **RECORDS)


# ---- Forced routing -----------------------------------------------------------------------------


def others_of(record: np.ndarray) -> np.ndarray:
    """Experts that the router did not choose; every third position is left to it."""
    forced = (record.astype(int) + 4) % EXPERTS.num_moe_experts
    forced[::3] = -1
    return forced


def test_prompts_go_to_given_experts(model, plain):
    """In chunks, in steps that would be captured, after an eviction, and beside others, which go
    where they go alone."""
    engine = make_engine(model, device=CapturingCpu(), max_tokens=12, max_requests=4, **RECORDS)
    prompts = random_prompts(2, (30, 30))
    (free,) = engine.generate(prompts[:1], greedy(1))
    forced = others_of(free.routing_indices)
    futures = [
        engine.add_request(10, prompts[0], greedy(6, forced_routing=forced)),
        engine.add_request(11, prompts[1], greedy(6)),
    ]
    for _ in range(4):
        engine.step_modern()
    engine.suspend(free_kv_cache=True)
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    first, second = (future.result() for future in futures)
    found = first.routing_indices[:30]
    assert (found[forced >= 0] == forced[forced >= 0]).all()
    assert (found[::3] != free.routing_indices[::3]).any(), "states before them are others"
    check(plain, second)


def test_a_failed_step_forces_nobody_else(model, monkeypatch):
    engine = make_engine(model, lookahead=0)
    prompts = random_prompts(8, (6, 7))
    (expected,) = engine.generate(prompts[1:], greedy(6))
    engine.reset_prefix_cache()
    with monkeypatch.context() as patched:

        def fail(view: Any) -> None:
            raise ValueError("planned")

        patched.setattr(engine.controller.inference_wrapped_model, "forward", fail)
        params = greedy(2, forced_routing=np.full((6, 2, 2), [3, 6]))
        (failed,) = engine.generate(prompts[:1], params)
    assert failed.finish_reason == "error"
    (after,) = engine.generate(prompts[1:], greedy(6))
    assert after.generated_tokens == expected.generated_tokens


def test_a_score_by_a_record_is_the_rollouts(model):
    """What a trainer asks for, though its weights have moved the routers meanwhile."""
    engine = make_engine(model, **RECORDS)
    (rollout,) = engine.generate(random_prompts(6, (9,)), greedy(8, return_log_probs=True))
    record, tokens = rollout.routing_indices, [*rollout.prompt_tokens, *rollout.generated_tokens]
    other = make_model(EXPERTS)
    for router in (each for each in other.modules() if isinstance(each, TopKRouter)):
        router.weight.data[2:4] += 5.0
    params = SamplingParams(forced_routing=record)
    moved = make_engine(other, **RECORDS)
    (scored,) = moved.score([tokens], 9, params)
    assert (scored.routing_indices == record).all()
    (free,) = moved.score([tokens], 9)
    assert (free.routing_indices != record).any()
    (again,) = engine.score([tokens], 9, params)
    found = torch.tensor(again.prompt_log_probs), torch.tensor(rollout.generated_log_probs)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_forced_prompts_share_blocks_with_their_like_alone(model):
    engine = make_engine(model, block_size_tokens=4, **RECORDS)
    prompt = random_prompts(3, (13,))[0]
    (free,) = engine.generate([prompt], greedy(1))
    params = greedy(1, forced_routing=others_of(free.routing_indices))
    cached = [engine.generate([prompt], each)[0].num_cached_tokens for each in (params, params)]
    assert cached == [0, 12]
    (again,) = engine.generate([prompt], greedy(1))
    assert again.num_cached_tokens == 12
    assert (again.routing_indices == free.routing_indices).all()


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        (np.zeros((4, 2, 2), int), r"position 0 in layer 0 is \[0, 0\]: give different experts"),
        (np.full((4, 2, 2), [1, 8]), r"\[1, 8\]: give different experts from 0 to 7, or -1"),
        (np.full((4, 2, 2), [1, -1]), r"\[1, -1\]: give different experts"),
        (np.zeros((4, 2, 3), int), r"shape \(4, 2, 3\) .* integers \[positions, 2, 2\]"),
        (np.full((5, 2, 2), -1), "at most the prompt's 4 positions"),
        (np.zeros((4, 2, 2)), "dtype float64 is not allowed"),
        (3, r"shape \(\) and dtype"),
        ([[1], [2, 3]], "no array of expert ids"),
        (b"123", "no array of expert ids"),
    ],
)
def test_wrong_experts_are_refused(model, forced, message):
    engine = make_engine(model)
    params = [greedy(2, forced_routing=forced), greedy(2)]
    wrong, right = engine.generate([[1, 2, 3, 4]] * 2, params)
    with pytest.raises(RequestError, match=message):
        raise wrong.error
    assert right.error is None


def test_a_model_without_experts_forces_none():
    engine = make_engine(make_model())
    (request,) = engine.generate([[1]], greedy(1, forced_routing=b""))
    drain(engine)
    with pytest.raises(RequestError, match="for models that have layers with experts"):
        raise request.error


# ---- Ranks ------------------------------------------------------------------------------------

PROMPTS = ([3, 1, 4], list(range(40, 60)), [7] * 5, list(range(40, 56)))
PARAMS = SamplingParams(num_tokens_to_generate=8, temperature=1.0, seed=3, termination_id=-1)


FORCED = replace(PARAMS, forced_routing=np.full((16, 2, 2), [5, 1]))


def records_of(numbers: tuple[int, ...], **sizes: Any) -> list[list[Any]]:
    """Records of prompts, and of the last one when its tokens have to go elsewhere."""
    settings: dict[str, Any] = {"max_tokens": 24, "max_requests": 8, "block_size_tokens": 4}
    with LLM("dummy:tiny-moe", device="cpu", **settings, **RECORDS, **sizes) as llm:
        answers = llm.generate([PROMPTS[number] for number in numbers], PARAMS)
        answers += llm.generate([PROMPTS[3]], FORCED)
        return [request.routing_indices.tolist() for request in answers]


STAGES = {"pipeline_model_parallel_size": 2}


def _on_ranks(sizes: dict[str, Any], work: tuple[tuple[int, ...], ...]) -> list[list[Any]]:
    return records_of(work[int(os.environ["RANK"]) % len(work)], **sizes)


@pytest.mark.parametrize(
    ("sizes", "work"),
    [
        ({"expert_model_parallel_size": 2}, ((0, 1), (2, 3))),
        ({"tensor_model_parallel_size": 2}, ((0, 1, 2, 3),)),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, ((0, 1, 2, 3),)),
        (STAGES, ((0, 1, 2, 3),)),
        (
            {
                **STAGES,
                "num_kv_blocks": 9,
                "speculative_method": "ngram",
                "num_speculative_tokens": 2,
            },
            ((0, 1, 2, 3),),
        ),
    ],
    ids=["experts", "tensors", "sequence", "stages", "stages, evicted, drafted"],
)
def test_ranks_record_what_one_rank_does(sizes, work):
    alone = records_of((0, 1, 2, 3))
    found = run_ranks(2, _on_ranks, sizes, work)
    for rank, records in enumerate(found):
        numbers = work[rank % len(work)]
        leads = rank == 0 or len(work) > 1
        wanted = [*(alone[number] for number in numbers), alone[-1]]
        assert records == (wanted if leads else [])
    assert alone[-1][:16] == FORCED.forced_routing.tolist()


def test_a_stage_whose_rows_are_late_is_found():
    found = run_ranks(2, _late_stage)[0]
    assert found != records_of((0, 1))
    assert [list(map(len, record)) for record in found[0]] == [[2, 2]] * len(found[0])


def _late_stage() -> list[list[Any]]:
    """The planted bug: stage 1 writes each step's rows behind the next step."""
    late: list[Any] = []

    def store(recorder: RoutingRecorder, view: Any) -> None:
        late.append((torch.stack(view.routing.experts), view.step.write_index.clone()))
        if len(late) > 1:
            view.ops.keep_routing(*late.pop(0), view.kv_cache.block_routing.flatten(0, 1))

    if os.environ["RANK"] == "1":
        RoutingRecorder.store = store
    return records_of((0, 1), **STAGES)


# ---- Megatron's replay ------------------------------------------------------------------------


@pytest.fixture
def replays() -> Iterator[type[RouterReplay]]:
    """Megatron's class, whose instances are of one model at a time."""
    RouterReplay.clear_global_router_replay_instances()
    yield RouterReplay
    RouterReplay.clear_global_router_replay_instances()


def test_megatrons_own_forward_records_and_replays_the_same(replays):
    """A trainer's `GPTModel` chooses what the record says; made to replay a record, it goes there
    whatever its router prefers."""
    fields = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    model = gpt_model({**fields, "moe_enable_routing_replay": True}, {}).eval()
    engine = engine_of(model, lookahead=1, **RECORDS)
    (request,) = engine.generate([[5, 6, 7, 8, 40, 2]], greedy(9))
    tokens, record = [*request.prompt_tokens, *request.generated_tokens], request.routing_indices
    replays.set_global_router_replay_action(RouterReplayAction.RECORD)
    logits = logits_of(model, tokens[:-1])
    own = torch.stack(replays.get_recorded_data(), 1)
    assert (own.numpy() == record).all()
    replays.set_replay_data(list(torch.from_numpy(record.astype(np.int64)).unbind(1)))
    replays.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert torch.equal(logits_of(model, tokens[:-1]), logits)
    others = (own + 3) % 8
    replays.set_replay_data(list(others.unbind(1)))
    forced = logits_of(model, tokens[:-1])
    assert not torch.equal(forced, logits)
    # Our layers go there too, if they have to.
    params = greedy(1, return_log_probs=True, forced_routing=others.numpy())
    (scored,) = engine.generate([tokens[:-1]], params)
    wanted = forced.log_softmax(1)[:-1].gather(1, torch.tensor(tokens[1:-1])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored.prompt_log_probs), wanted, rtol=1e-4, atol=1e-4)
    assert (scored.routing_indices == others.numpy()).all()


def test_megatrons_requests_have_the_record(replays):
    """Rows are int32, as its server reads them; none is of tokens that a stop word has cut off."""
    fields = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    model = gpt_model({**fields, "moe_enable_routing_replay": True}, {}).eval()
    with compat_engine(model) as engine:
        for number, stop_words in enumerate([None, ["]"]]):
            params = MegatronParams(num_tokens_to_generate=12, top_k=1, termination_id=-1)
            params.stop_words = stop_words
            engine.add_request(number, [5, 6, 7, 8], params)
        found = []
        while engine.has_unfinished_requests():
            found += engine.step_modern()["finished_request_records"]
        for record in found:
            request = record.merge()
            rows = request.routing_indices
            assert rows.dtype == np.int32
            assert rows.shape == (4 + len(request.generated_tokens) - 1, 2, 2)
            assert request.serialize()["routing_indices"] is not None
            assert record.requests[0].serialize()["routing_indices"] is not None
        assert sorted(len(each.merge().generated_tokens) for each in found) == [6, 12]
