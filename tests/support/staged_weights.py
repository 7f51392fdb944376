"""Weights of another model as a `Stage`, and what an engine says that stops for each change."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.requests.weight_versions import Span, Version
from tests.support.harness import Job


class StagedWeights:
    """The parameters of `source`, to be copied to those of `engine`'s model on its compute stream;
    `fails` is raised by the commit instead."""

    def __init__(
        self, engine: DynamicInferenceEngine, source: torch.nn.Module, fails: Any = None
    ) -> None:
        self._device = engine.context.device
        self._wrapper = engine.controller.inference_wrapped_model
        self._source, self._fails = source, fails
        self.was_committed = self.was_dropped = False

    def commit(self) -> bool:
        if self._fails is not None:
            raise self._fails
        assert not self.was_dropped
        self.was_committed = True
        self._device.compute.launch(partial(copy_weights, self._wrapper.model, self._source))
        return self._wrapper.derived.refresh()

    def drop(self) -> None:
        self.was_dropped = not self.was_committed


@torch.no_grad()
def copy_weights(model: torch.nn.Module, source: torch.nn.Module) -> None:
    for mine, theirs in zip(_tensors(model), _tensors(source), strict=True):
        mine.copy_(theirs)


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and what the small recurrent layers hold in a record of their own."""
    found = [parameter.data for parameter in model.parameters()]
    for module in model.modules():
        found += vars(module).get("params", ())
    return found


class Stopped:
    """An engine at lookahead 0 that stops after each token, for what a request says under changing
    weights: `models` by version; a change between two tokens is a swap and, where the token's
    index is in `evicted`, a prefill of everything again."""

    def __init__(
        self, engine: DynamicInferenceEngine, models: dict[Version, torch.nn.Module]
    ) -> None:
        self._engine, self._models = engine, models
        self._wrapper = engine.controller.inference_wrapped_model

    def tokens(
        self, job: Job, number: int, versions: Sequence[Version], evicted: Sequence[int] = ()
    ) -> list[int]:
        """Tokens, as many as there are versions; the request's number seeds it."""
        engine, now = self._engine, None
        future = engine.add_request(number, job.prompt, job.params)
        slots = engine.context.slots
        for place, version in enumerate(versions):
            if place == 0 or version != now or place in evicted:
                engine.reset_prefix_cache()
                engine.pause()
                if place in evicted:
                    engine.suspend(free_kv_cache=True)
                copy_weights(self._wrapper.model, self._models[version])
                self._wrapper.derived.refresh()
                engine.resume()
                engine.unpause()
                now = version
            before = place
            while not future.done() and len(slots.tokens_since(number, 0) or ()) <= before:
                engine.step_modern()
        if not future.done():
            known = slots.tokens_since(number, 0)
            engine.abort_request(number)
            assert known is not None
        else:
            known = future.result().generated_tokens
        while engine.has_unfinished_requests():
            engine.step_modern()
        return known


def by_token(found: Sequence[Span]) -> list[Version]:
    """The version of each token."""
    places = [(first, end) for _, first, end in found]
    assert [first for first, _ in places] == [0, *(end for _, end in places)][: len(places)]
    return [version for version, first, end in found for _ in range(first, end)]


Act = Callable[[], Any]
