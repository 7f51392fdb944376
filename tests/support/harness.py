"""What the functional tests share: a lively tiny model, engines that are watched, plain runs."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.devices import CpuDevice, Device
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import build_model
from megatron_async.observe.timeline import Timeline
from megatron_async.step.drafting import Drafter

CPU = torch.device("cpu")
EngineFactory = Callable[..., DynamicInferenceEngine]
"""Fixtures of conftest.py that make engines."""
NUM_TOKENS = 28
"""Tokens that the demo model generates for a prompt where it is compared with transformers."""
TINY = ModelArchitecture("llama", 2, 32, 4, 2, 8, 64, 128, max_position_embeddings=1024)
"""Small enough for thousands of steps a second."""


def fail_call(owner: Any, name: str, call: int | Callable[[int], Any], error: Any) -> None:
    """Let a call of a method raise, counted from now and from 1; or each that `call` chooses."""
    method, calls = getattr(owner, name), itertools.count(1)
    fails = call if callable(call) else call.__eq__

    def called(*args: Any) -> Any:
        if fails(next(calls)):
            raise error
        return method(*args)

    setattr(owner, name, called)


def make_model(
    architecture: ModelArchitecture = TINY,
    device: torch.device = CPU,
    seed: int = 0,
    with_mtp: bool = False,
) -> torch.nn.Module:
    """A float32 model with random weights, the same on every device; its layers for multi-token
    prediction are built if asked for. The weights are large, so that each token depends on the
    whole sequence before it. (With small ones a model repeats its last token, and a wrong KV cache
    would go unseen.)"""
    model = build_model(architecture, torch.float32, device, with_mtp=with_mtp)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Slow decay, so that a recurrent state too remembers the whole sequence.
            decay = 0.01 + 0.2 * torch.rand(parameter.shape, generator=generator)
            parameter.data.copy_(decay.log())
        elif name.endswith("dt_bias"):
            parameter.data.fill_(-1.0)
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            scale = 1.0 if "embedding" in name else 2.0 / math.sqrt(parameter.size(1))
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data.copy_(values)
    return model


def make_engine(
    model: torch.nn.Module,
    *,
    tokenizer: Any = None,
    device: Device | None = None,
    timeline: Timeline | None = None,
    drafter: Drafter | None = None,
    **config: Any,
) -> DynamicInferenceEngine:
    """The trio around `model`, its books checked after every step."""
    if "buffer_size_gb" not in config:
        # The default pool is 1 GiB, which takes longer to zero than most tests.
        config = {"num_kv_blocks": 256, **config}
    settings = InferenceConfig(**{"check_integrity": True, "max_sequence_length": 512, **config})
    device = device or CpuDevice()
    context = DynamicInferenceContext(model.config, settings, device, timeline)
    wrapped = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapped, tokenizer, drafter)
    return watched(DynamicInferenceEngine(controller, context))


_watched: list[DynamicInferenceEngine] | None = None
"""Engines of the test that runs."""


def watched[Engine: DynamicInferenceEngine](engine: Engine) -> Engine:
    """`engine`, which `engines_are_closed` then closes."""
    if _watched is not None:
        _watched[:] = [each for each in _watched if not each.loop.is_closed] + [engine]
    return engine


def kept[Engine: DynamicInferenceEngine](engine: Engine) -> Engine:
    """`engine`, which stays open behind the test that happens to make it."""
    if _watched is not None:
        _watched.remove(engine)
    return engine


@contextmanager
def engines_are_closed() -> Iterator[None]:
    """Close, at its end, the engines that are `watched` since and open still: all must be back."""
    global _watched
    _watched = []
    try:
        yield
    finally:
        engines = [engine for engine in _watched if not engine.loop.is_closed]
        _watched = None
        for engine in engines:
            engine.close()
    for engine in engines:
        assert_all_is_back(engine)


def assert_all_is_back(engine: DynamicInferenceEngine) -> None:
    """No request, step, block or slot is left behind."""
    context = engine.context
    assert not engine.has_unfinished_requests()
    assert not engine.in_flight
    assert len(context.waiting) == 0
    assert context.slots.num_free == context.max_requests
    assert context.blocks.allocatable == context.blocks.total
    context.check_integrity()


def greedy(tokens: int, **changes: Any) -> SamplingParams:
    """Exactly `tokens` greedy tokens, unless a stop token is given."""
    return SamplingParams(
        **{"temperature": 0.0, "num_tokens_to_generate": tokens, "termination_id": -1, **changes}
    )


@dataclass(frozen=True)
class Job:
    """A request of a scenario."""

    prompt: list[int]
    params: SamplingParams


def run_together(engine: DynamicInferenceEngine, jobs: Sequence[Job]) -> list[list[int]]:
    """Tokens of jobs that are all there from the start; each must complete."""
    outputs = engine.generate([job.prompt for job in jobs], [job.params for job in jobs])
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    drain(engine)
    return [output.generated_tokens for output in outputs]


def run_alone(engine: DynamicInferenceEngine, jobs: Sequence[Job]) -> list[list[int]]:
    """Tokens of jobs that never meet. Job i has request id i, which seeds its samples if it brings
    no seed."""
    return [run_at(engine, {0: [job]}, first_id=number)[0] for number, job in enumerate(jobs)]


_ANSWERS: WeakKeyDictionary[DynamicInferenceEngine, dict[Any, list[int]]] = WeakKeyDictionary()


def alone_once(engine: DynamicInferenceEngine, jobs: Sequence[Job]) -> list[list[int]]:
    """`run_alone` of a serial engine that several tests share: each job runs the first time only,
    by whichever test asks for it."""
    known = _ANSWERS.setdefault(engine, {})
    found = []
    for number, job in enumerate(jobs):
        key = number, tuple(job.prompt), repr(job.params)
        if key not in known:
            known[key] = run_at(engine, {0: [job]}, first_id=number)[0]
        found.append(list(known[key]))
    return found


def run_at(
    engine: DynamicInferenceEngine, arrivals: dict[int, list[Job]], first_id: int = 0
) -> list[list[int]]:
    """Tokens of jobs that arrive at given steps, in the order of their arrival, with ids counted
    from `first_id`."""
    futures = []
    step = 0
    while len(futures) < sum(map(len, arrivals.values())) or engine.has_unfinished_requests():
        for job in arrivals.get(step, ()):
            number = first_id + len(futures)
            futures.append(engine.add_request(number, job.prompt, job.params))
        engine.step_modern()
        step += 1
    requests = [future.result() for future in futures]
    assert all(request.error is None for request in requests), [r.error for r in requests]
    return [request.generated_tokens for request in requests]


def drain(engine: DynamicInferenceEngine) -> None:
    """Steps until nothing is left: rows in flight of requests that have ended."""
    while engine.has_unfinished_requests():
        engine.step_modern()


def random_prompts(
    seed: int, lengths: Sequence[int], vocabulary: int = TINY.vocab_size
) -> list[list[int]]:
    """Prompts of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [int(token) for token in torch.randint(vocabulary, (length,), generator=generator)]
        for length in lengths
    ]
