"""Run prompts to their ends, step by step, with an engine's public methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.errors import RequestError
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine, Prompt

Futures = Mapping[int, "asyncio.Future[DynamicInferenceRequest] | None"]
"""By request id; None: nobody knows whether the request was added."""


def run_to_end(
    engine: DynamicInferenceEngine,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> list[DynamicInferenceRequest]:
    """Answer prompts: add all, step until all have ended (`DynamicInferenceEngine.generate`)."""
    if isinstance(sampling_params, Sequence):
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(sampling_params)} sampling_params were given for {len(prompts)} "
                "prompts: give one for all, or one for each."
            )
        each: Sequence[SamplingParams | None] = sampling_params
    else:
        each = [sampling_params] * len(prompts)
    futures: dict[int, asyncio.Future[DynamicInferenceRequest] | None] = {}
    try:
        for prompt, params in zip(prompts, each, strict=True):
            number = engine.requests.free_id()
            futures[number] = None
            futures[number] = engine.add_request(number, prompt, params)
        # A call on one rank is that of the others of its number: it ends when none has work left,
        # and does not take one who waits already, in the next call, for one who goes on.
        engine.group.begin_together()
        added = [future for future in futures.values() if future is not None]
        while not all(future.done() for future in added) or engine.group.others_work:
            report = engine.step_modern()
            if on_step is not None:
                on_step(report)
        return [future.result() for future in added]
    except BaseException as error:
        if not isinstance(error, Exception):
            try:
                _abandon(engine, futures)
            finally:  # another Ctrl-C may have cut that short
                _abandon(engine, futures)
        raise


def _abandon(engine: DynamicInferenceEngine, futures: Futures) -> None:
    """End requests of a call that is interrupted, so that the next call does not pay for them, and
    its reports do not have them."""
    if engine.pausing.is_closed or engine.job.is_lost:
        return
    for number, future in futures.items():
        if number in engine.requests and (future is None or not future.done()):
            engine.abort_request(number)
    engine.forget_ended(futures)
