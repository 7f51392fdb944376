"""What a pipeline must do just as one rank does: called on every rank, with the same requests."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron_async import DynamicInferenceEngine, SamplingParams, StructuredOutput
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.source import model_parameters, named_tensors
from megatron_async.devices.cpu import Chaos, CpuDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.pipeline import stage_of
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    CPU,
    Job,
    assert_all_is_back,
    drain,
    fail_call,
    greedy,
    make_engine,
    random_prompts,
)

UNEVEN = ModelArchitecture("llama", 5, 32, 4, 2, 8, 64, 128, tie_word_embeddings=True)
"""Five layers: no number of stages divides them."""
Result = dict[str, Any]


def stage_model(
    stages: int, architecture: ModelArchitecture = UNEVEN, device: torch.device = CPU
) -> torch.nn.Module:
    """This rank's stage of a float32 model with large random weights (see `harness.make_model`)."""
    model = build_model(
        architecture, torch.float32, device, sizes=ParallelSizes(pipeline_model_parallel=stages)
    )
    wanted = list(weights(architecture, Shard.of(model)))
    parameters = model_parameters(named_tensors(model), wanted)
    for weight in wanted:
        parameter = parameters[weight.name]
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            scale = 1.0 if "embedding" in weight.stored else 2.0 / math.sqrt(parameter.size(1))
            generator = torch.Generator().manual_seed(crc32(weight.stored.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def letter_tokenizer() -> Any:
    """Token i is the letter i of an alphabet of 127; token 127 ends."""
    from megatron_async.text.tokenizer import Tokenizer

    alphabet = [chr(i) for i in range(ord("!"), ord("~") + 1)]
    alphabet += [chr(256 + i) for i in range(127 - len(alphabet))]
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, [127], None, "test")


def sampled(seed: int, tokens: int = 14, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 1.0,
            "seed": seed,
            "num_tokens_to_generate": tokens,
            "termination_id": -1,
            **changes,
        }
    )


PARAMS = [
    greedy(20),
    sampled(1, top_k=9, stop_token_ids=list(range(0, 128, 7))),
    sampled(2, top_p=0.8, frequency_penalty=0.7, presence_penalty=0.3),
    sampled(3, repetition_penalty=1.4, return_log_probs=True, top_n_logprobs=2),
    greedy(9, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=1),
    sampled(4, 17, temperature=2.0, bad_words=[[5], [7, 9]], min_tokens=4, logit_bias={3: 2.0}),
    greedy(1),
]
PROMPTS = random_prompts(3, [5, 19, 1, 40, 33, 8, 12], 127)
JOBS = [Job(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
GRAMMARS = [
    sampled(5, 30, structured_output=StructuredOutput(regex=r"(\d{3}-){1,4}[a-f]{5}")),
    greedy(16),
    sampled(6, 30, structured_output=StructuredOutput(choice=["red", "green", "blue"])),
    sampled(
        7, 30, structured_output=StructuredOutput(regex="[a-z]{2,20}!"), frequency_penalty=1.0,
        return_log_probs=True,
    ),
    sampled(8, 12, structured_output=StructuredOutput(regex="[0-9]{8}")),
]  # fmt: skip


def everything(requests: Iterable[Any]) -> list[Result]:
    """What users get of their requests."""
    return [
        {
            "tokens": request.generated_tokens,
            "status": request.status.name,
            "reason": request.finish_reason,
            "log probs": request.generated_log_probs,
            "prompt log probs": request.prompt_log_probs,
            "top": request.generated_top_n_logprobs,
        }
        for request in requests
    ]


def all_at_once(engine: DynamicInferenceEngine) -> list[Result]:
    """Everything that sampling can do, prompts in chunks, more requests than slots."""
    done = everything(engine.generate(*zip(*((job.prompt, job.params) for job in JOBS))))
    drain(engine)
    return done


def one_request(engine: DynamicInferenceEngine) -> list[Result]:
    """Micro-batches without work are passed over; with nobody else every token makes the tour."""
    done = everything(engine.generate([PROMPTS[3]], PARAMS[0]))
    drain(engine)
    return done


def arrivals(engine: DynamicInferenceEngine) -> list[Result]:
    """Requests join others in the middle."""
    futures = []
    for number, job in enumerate(JOBS):
        futures.append(engine.add_request(number, job.prompt, job.params))
        for _ in range(2):
            engine.step_modern()
    drain(engine)
    return everything(future.result() for future in futures)


def aborts(engine: DynamicInferenceEngine) -> list[Result]:
    """Requests are aborted while they wait, prefill and decode, and their slots taken at once."""
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(JOBS)]
    for number in (3, 0, 6):
        engine.step_modern()
        engine.step_modern()
        engine.abort_request(number)
    drain(engine)
    return everything(f.result() for n, f in enumerate(futures) if n not in (0, 3, 6))


def grammars(engine: DynamicInferenceEngine) -> list[Result]:
    """Masks go to the last stage, tokens under them come back late."""
    for params in GRAMMARS:  # each stage schedules for itself here: none may wait for a grammar
        if params.structured_output is not None:
            engine.grammars.begin(params.structured_output).result()
    done = everything(engine.generate(PROMPTS[: len(GRAMMARS)], GRAMMARS))
    drain(engine)
    return done


def stops(engine: DynamicInferenceEngine) -> list[Result]:
    """The engine is paused, and suspended without its KV cache, with steps in flight."""
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(JOBS)]
    for stop, go_on in (
        (engine.pause, engine.unpause),
        (partial(engine.suspend, free_kv_cache=True), engine.resume),
    ):
        for _ in range(5):
            engine.step_modern()
        stop()
        go_on()
    drain(engine)
    return everything(future.result() for future in futures)


def shared(engine: DynamicInferenceEngine) -> list[Result]:
    """Prompts begin alike; on several stages their first chunks begin after blocks of others, and
    evicted requests after their own. The last stage alone knows the tokens there."""
    is_split = stage_of(engine.context.model_config).count > 1
    futures = []
    for number, job in enumerate(JOBS):
        prompt = [*PROMPTS[3][:30], *job.prompt[:9]]
        penalties = {"repetition_penalty": (3.0, 0.4)[number % 2], "frequency_penalty": 2.0}
        params = sampled(number, 30, temperature=number % 3, **penalties)
        futures.append(engine.add_request(number, prompt, params))
        for _ in range(2):
            engine.step_modern()
    drain(engine)
    if is_split:
        assert engine.stats()["prefix_cache_hits"] > 80, engine.stats()
    return everything(future.result() for future in futures)


ROOM = {"num_kv_blocks": 64, "block_size_tokens": 16}
CASES: dict[str, tuple[Callable[[DynamicInferenceEngine], list[Result]], dict[str, Any]]] = {
    "all at once": (all_at_once, {"max_tokens": 16, "max_requests": 5, **ROOM}),
    "small pool": (all_at_once, {"num_kv_blocks": 15, "block_size_tokens": 4, "max_tokens": 16,
                                 "max_requests": 7, "max_sequence_length": 60}),
    "one request": (one_request, {"max_tokens": 8, "max_requests": 2, **ROOM}),
    "arrivals": (arrivals, {"max_tokens": 32, "max_requests": 6, **ROOM}),
    "aborts": (aborts, {"max_tokens": 12, "max_requests": 4, **ROOM}),
    "shared": (shared, {"num_kv_blocks": 20, "block_size_tokens": 4, "max_tokens": 32,
                        "max_requests": 7, "max_sequence_length": 80,
                        "enable_prefix_caching": True}),
    "stops": (stops, {"max_tokens": 24, "max_requests": 5, **ROOM}),
    "grammars": (grammars, {"max_tokens": 64, "max_requests": 8, **ROOM}),
}  # fmt: skip


def run_cases(
    stages: int, runs: dict[str, list[int]], chaos: bool = True
) -> dict[tuple[str, int], tuple[list[Result], dict[str, float | int]]]:
    """Outcomes of cases on this rank, and its counters, by (case, lookahead); `runs` has the
    lookaheads of each case, and `chaos` delays launched work at random."""
    model, tokenizer = stage_model(stages), letter_tokenizer()
    found = {}
    for name, lookaheads in runs.items():
        case, settings = CASES[name]
        for lookahead in lookaheads:
            delays = Chaos(lookahead, 0.2, 0.001) if chaos else None
            engine = make_engine(
                model, tokenizer=tokenizer, device=CpuDevice(delays), lookahead=lookahead,
                **settings,
            )  # fmt: skip
            found[name, lookahead] = case(engine), dict(engine.stats())
            engine.close()
            assert_all_is_back(engine)
    return found


def run_captured() -> tuple[list[Result], dict[str, float | int]]:
    """Outcome and counters of "arrivals" on two stages, steps padded and replayed."""
    case, settings = CASES["arrivals"]
    engine = make_engine(
        stage_model(2), tokenizer=letter_tokenizer(), device=CapturingCpu(), lookahead=2,
        num_cuda_graphs=2, **settings,
    )  # fmt: skip
    found = case(engine), dict(engine.stats())
    engine.close()
    return found


def fail_once(stage: int, where: str) -> tuple[list[Result], list[str], list[Result]]:
    """A step fails on one of two stages: in its forward, already when it is launched, or only when
    it hands its results on. Returns what becomes of the requests, the causes of those that failed,
    and how later ones fare."""
    model = stage_model(2)
    mine = stage_of(model.config).index == stage
    engine = make_engine(model, lookahead=2, max_requests=6, max_tokens=64, **ROOM)
    owner, name = {
        "forward": (engine.controller.inference_wrapped_model, "forward"),
        "launch": (engine.context, "transfer_bookkeeping_to_gpu"),
        "send": (engine.controller.stage, "_write"),
    }[where]
    if mine:
        fail_call(owner, name, 7, ValueError("told to fail"))
    requests = engine.generate(PROMPTS[:6], [greedy(12)] * 6)
    later = everything(engine.generate(PROMPTS[:3], [greedy(12)] * 3))
    causes = [repr(r.error.__cause__) for r in requests if r.error is not None]
    drain(engine)
    engine.close()
    assert_all_is_back(engine)
    return everything(requests), causes, later
