"""Tensor parallelism on several GPUs (sums through symmetric memory, captured) and pipelines of
them (stages captured, messages between the graphs): one rank's tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.devices import CpuDevice, Device, make_device
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups, world_size
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.ranks.symmetric_choice import LEAST_ROWS
from megatron_async.ops.ranks.tensor_collectives import TensorCollectives, collectives_of
from megatron_async.ops.ranks.vocabulary_shard import VocabularyShard
from megatron_async.ops.sampling import triton_sampling
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header
from tests.support.cards import on_cards
from tests.support.harness import Job, drain, greedy, make_engine, make_model, random_prompts
from tests.support.pipeline_scenarios import JOBS, Result, everything, stage_model
from tests.support.ranks import run_ranks

HIDDEN, EPS = 512, 1e-5
WORLDS = on_cards([2, 4])
ROWS = (1, 3, 64, 700)
SMALL = ModelArchitecture("llama", 4, 256, 8, 4, 32, 512, 1023, max_position_embeddings=1024)
SAMPLED = [
    greedy(32),
    SamplingParams(temperature=0.9, seed=1, num_tokens_to_generate=32, termination_id=-1),
    SamplingParams(temperature=0.8, top_k=9, seed=2, num_tokens_to_generate=9, termination_id=-1),
]
"""Steps with a filtered row gather logits, others exchange scores and tokens."""
TENSOR_JOBS = [
    Job(prompt, params)
    for prompt, params in zip(
        random_prompts(0, (1, 5, 33, 100, 17, 2), 1023), SAMPLED * 2, strict=True
    )
]
VOCAB = 10001
"""Three ranks of four begin inside a group of noise, and the last one's columns end in padding."""
SETTINGS = [
    (sequence_parallel, {"lookahead": lookahead, "max_tokens": max_tokens})
    for sequence_parallel, lookahead, max_tokens in (
        (False, 0, 256),
        (False, 1, 32),
        (False, 2, 256),
        (True, 1, 32),
    )
]


def make_collectives(dtype: torch.dtype) -> TensorCollectives:
    device = make_device("cuda").torch_device
    groups = ensure_process_groups(ParallelSizes(world_size()))
    collectives = collectives_of(groups.tp)
    collectives.prepare(1024, HIDDEN, dtype, device)
    assert collectives.symmetric, collectives.fallback
    return collectives


def summands(rows: int, splits: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Summands of all ranks, on this one."""
    found = []
    for rank in range(world_size()):
        generator = torch.Generator().manual_seed(10 * rows + rank)
        shape = (splits, rows, 1, HIDDEN) if splits > 1 else (rows, 1, HIDDEN)
        x = torch.randn(shape, generator=generator)
        found.append((x if splits > 1 else x.to(dtype)).cuda())
    return found


def sums(dtype_name: str) -> list[list[float]]:
    """Checks sums against torch's, and returns bits to compare between ranks."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    collectives = make_collectives(dtype)
    symmetric = collectives.symmetric[HIDDEN, dtype]
    bits = []
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    for rows in ROWS:
        for splits in (1, 3):
            parts = summands(rows, splits, dtype)
            whole = [(p.sum(0) if splits > 1 else p).to(dtype) for p in parts]
            expected = torch.stack([part.float() for part in whole]).sum(0).to(dtype)
            mine = parts[collectives.rank]
            found = collectives.keep(collectives.all_reduce(mine.clone(), dtype))
            torch.testing.assert_close(found, expected, **tolerance)
            bits.append(found.float().flatten().tolist())
            ordered = symmetric.in_order(mine.clone())
            torch.testing.assert_close(ordered, expected, **tolerance)
            bits.append(ordered.float().flatten().tolist())
            if not collectives.adds_with_norm(mine, dtype):
                assert rows > symmetric.one_shot_rows
                continue
            residual = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(
                dtype
            )
            weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
            residual, weight = residual.cuda(), weight.cuda()
            reference = add_rms_norm.reference(expected[:, 0], residual, weight, EPS)
            for _ in range(5):  # both places of a row, and turns that wrap around them
                normed, total = collectives.all_reduce_add_rms_norm(mine, residual, weight, EPS)
                torch.testing.assert_close(total, reference[1], **tolerance)
                torch.testing.assert_close(normed, reference[0], **tolerance)
            nothing = torch.zeros_like(residual)
            _, total = collectives.all_reduce_add_rms_norm(mine, nothing, weight, EPS)
            assert torch.equal(total, ordered[:, 0] + nothing), "one order, however many rows"
            bits.append(normed.float().flatten().tolist())
    return bits


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_right_and_equal_on_all_ranks(dtype: str, world: int) -> None:
    first, *others = run_ranks(world, sums, dtype, timeout_s=120)
    assert all(other == first for other in others)


def replayed_sums() -> int:
    """A graph of a chain of sums, replayed with other inputs each time."""
    collectives = make_collectives(torch.float32)
    world = world_size()
    device = make_device("cuda")
    x = torch.zeros(7, 1, HIDDEN, device="cuda")
    weight = torch.ones(HIDDEN, device="cuda")
    out = torch.zeros(7, HIDDEN, device="cuda")

    def chain() -> None:
        total = torch.zeros_like(out)
        for _ in range(3):
            _, total = collectives.all_reduce_add_rms_norm(x, total, weight, EPS)
        total = total + collectives.all_reduce(x.clone())[:, 0]
        out.copy_(total)

    device.fence()
    device.compute.launch(chain)
    graph = device.capture(chain)
    for number in range(200):
        device.compute.launch(lambda number=number: x.fill_(number + collectives.rank))
        device.compute.launch(graph.replay)
        torch.cuda.synchronize()
        assert bool((out == 4 * (world * number + world * (world - 1) // 2)).all()), (number, out)
    return sum(collectives.calls.values())


@pytest.mark.parametrize("world", WORLDS)
def test_captured_sums_follow_their_inputs(world: int) -> None:
    assert run_ranks(world, replayed_sums, timeout_s=120) == [8] * world


def rows_to_sample(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, SamplingRows]:
    """Logits `[rows, VOCAB]` with many ties, and parameters of greedy and sampled rows."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = torch.randn(rows, VOCAB, generator=generator, device="cuda").to(dtype)
    logits[::2] = logits[::2].round()
    number = torch.arange(rows, device="cuda")
    records = torch.zeros(rows, RECORD_WORDS, dtype=torch.int32, device="cuda")
    records[:, Header.TEMPERATURE] = ((number % 3) * 0.5).view(torch.int32)
    records[:, Header.SEED_LOW] = number.int()
    return logits, SamplingRows(number, number.int(), records)


def choices(dtype_name: str) -> dict[str, int]:
    """Chooses tokens eagerly, and from a graph, and compares them with those of one rank; returns
    which ways they went."""
    collectives = make_collectives(getattr(torch, dtype_name))
    device = make_device("cuda")
    collectives.prepare_choice(64, device.torch_device)
    local = -(-VOCAB // collectives.size)
    first = collectives.rank * local
    shard = VocabularyShard(VOCAB, first, min(VOCAB - first, local), collectives)
    for rows in (1, 3, 64, LEAST_ROWS, LEAST_ROWS + 1):
        logits, params = rows_to_sample(rows, getattr(torch, dtype_name))
        own = torch.full_like(logits[:, :1], 1e4).repeat(1, local)
        own[:, : shard.columns] = logits[:, first : first + shard.columns]
        for mode in (SamplingMode.GREEDY, SamplingMode.SOFTMAX):
            expected = triton_sampling.sample_gpu(logits, params, mode)[0]
            found = torch.zeros_like(expected)

            def choose(
                own: torch.Tensor = own,
                params: SamplingRows = params,
                mode: SamplingMode = mode,
                found: torch.Tensor = found,
            ) -> None:
                best = triton_sampling.best_tokens_gpu(own, params, mode, first, shard.columns)
                found.copy_(shard.choose(*best))

            device.fence()
            device.compute.launch(choose)
            torch.cuda.synchronize()
            assert torch.equal(found, expected), (rows, mode)
            graph = device.capture(choose)
            for _ in range(5):
                device.compute.launch(lambda found=found: found.zero_())
                device.compute.launch(graph.replay)
                torch.cuda.synchronize()
                assert torch.equal(found, expected), (rows, mode, "captured")
    return dict(collectives.calls)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_choose_what_one_rank_samples(dtype: str, world: int) -> None:
    expected = {"choice": 16, "choice by all-gather": 4}
    assert run_ranks(world, choices, dtype, timeout_s=120) == [expected] * world


def generate(name: str, ranks: int, sequence_parallel: bool, config: dict[str, Any]) -> Any:
    """Tokens (on the primary rank), all-reduces by kernel and number of graphs of an `LLM`."""
    with LLM(
        name,
        device="cuda",
        dtype="float32",
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        max_requests=6,
        num_kv_blocks=64,
        block_size_tokens=16,
        max_sequence_length=256,
        check_ranks_agree=True,
        **config,
    ) as llm:
        found = llm.generate(
            [job.prompt for job in TENSOR_JOBS], [job.params for job in TENSOR_JOBS]
        )
        assert all(request.error is None for request in found)
        controller = llm.engine.controller
        calls = dict(controller.inference_wrapped_model.collectives.calls)
        return [list(r.generated_tokens) for r in found], calls, controller.graphs.count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("small")
    save_huggingface(make_model(SMALL), SMALL, None, path)
    return str(path)


@pytest.fixture(scope="module")
def one_gpu(folder: str) -> list[list[int]]:
    tokens, _, _ = run_ranks(1, generate, folder, 1, False, SETTINGS[0][1], timeout_s=120)[0]
    assert len(set(map(tuple, tokens))) == len(TENSOR_JOBS), "the model tells prompts apart"
    return tokens


@pytest.mark.parametrize(("ranks", "world"), on_cards([(2, 2), (4, 4), (2, 4)]))
@pytest.mark.parametrize(("sequence_parallel", "config"), SETTINGS)
def test_several_gpus_say_what_one_says(
    folder: str,
    one_gpu: list[list[int]],
    ranks: int,
    world: int,
    sequence_parallel: bool,
    config: dict[str, Any],
) -> None:
    """Tensor-parallel ranks, alone and as two replicas."""
    found = run_ranks(world, generate, folder, ranks, sequence_parallel, config, timeout_s=240)
    for rank, (tokens, calls, graphs) in enumerate(found):
        assert tokens == ([] if rank % ranks else one_gpu)  # a follower returns none
        assert graphs > 0
        assert ("one shot" in calls) == (not sequence_parallel), calls
        assert calls["choice"] > 0, calls
        assert "choice by all-gather" not in calls, calls


# Heads that the kernels serve, and a number of layers that neither two nor four divides.
STAGED_SHAPE = ModelArchitecture(
    "llama", 5, 128, 4, 2, 32, 256, 128, tie_word_embeddings=True, max_position_embeddings=1024
)
ROOM = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_tokens": 64, "max_requests": 6}
PRESSURE = {**ROOM, "num_kv_blocks": 12}
LONG = [Job(prompt, greedy(80)) for prompt in random_prompts(4, [5, 19, 1, 40, 33, 8], 127)]
STAGED = [
    (0, 4, ROOM, JOBS),
    (1, 4, ROOM, JOBS),
    (3, 4, ROOM, JOBS),
    (2, 0, ROOM, JOBS),
    (2, 4, PRESSURE, LONG),
]
"""Lookahead, graphs, settings, requests."""


def run_stages(
    stages: int, cases: list[Any], device_of: Callable[[], Device]
) -> list[tuple[list[Result], dict[str, float | int]]]:
    """Outcomes and counters of cases."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = stage_model(stages, STAGED_SHAPE, device_of().torch_device)
    found = []
    for lookahead, graphs, settings, jobs in cases:
        engine = make_engine(
            model, device=device_of(), lookahead=lookahead, num_cuda_graphs=graphs, **settings
        )
        done = everything(engine.generate(*zip(*((job.prompt, job.params) for job in jobs))))
        drain(engine)
        found.append((done, dict(engine.stats())))
        engine.close()
    return found


@pytest.fixture(scope="module", params=on_cards([2, 4]))
def all_stages(request: pytest.FixtureRequest) -> list[list[Any]]:
    count = request.param
    return run_ranks(count, run_stages, count, STAGED, partial(make_device, "cuda"), timeout_s=300)


def test_stages_say_what_the_cpu_says(all_stages: list[list[Any]]) -> None:
    alone = run_stages(1, [(0, 0, ROOM, jobs) for jobs in (JOBS, LONG)], CpuDevice)
    for rank in all_stages:
        for case, (requests, _) in zip(STAGED, rank, strict=True):
            wanted, _ = alone[case[3] is LONG]
            for got, expected in zip(requests, wanted, strict=True):
                assert got["tokens"] == expected["tokens"], case
                for key in ("log probs", "prompt log probs"):
                    if expected[key] is not None:
                        assert got[key] == pytest.approx(expected[key], abs=1e-3), case


def test_steps_were_captured_and_requests_evicted(all_stages: list[list[Any]]) -> None:
    for rank in all_stages:
        counters = [stats for _, stats in rank]
        assert all(stats["captured_steps"] > 0 for stats in counters[:3])
        assert counters[3]["captured_steps"] == 0
        assert counters[4]["pauses"] > 0
        assert all(stats["failed_steps"] == 0 for stats in counters)


def no_hidden_wait(stages: int) -> None:
    """Steady decode with synchronisation forbidden on the host."""
    model = stage_model(stages, STAGED_SHAPE, make_device("cuda").torch_device)
    engine = make_engine(model, device=make_device("cuda"), lookahead=2, **ROOM)
    for number, prompt in enumerate(random_prompts(1, [5, 9, 3, 7], 127)):
        engine.add_request(number, prompt, greedy(40))
    for _ in range(12):
        engine.step_modern()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step_modern()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)
    engine.close()


@pytest.mark.parametrize("stages", on_cards([2, 4]))
def test_steps_wait_for_nothing_else(stages: int) -> None:
    run_ranks(stages, no_hidden_wait, stages, timeout_s=200)
