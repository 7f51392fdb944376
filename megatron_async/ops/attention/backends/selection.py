"""Which prefill backend serves a step: the requested one, or the fastest of those available.

Backends are timed once, when an engine starts, in a CUDA graph and on a typical shape of each class
of steps: whole chunks, limited by the matrix units; short chunks after a long sequence, limited by
the number of programs that share the sequence; and short prompts, limited by the launch; each of
them alone and beside decode rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_async.devices import Device
from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    BackendUnavailable,
    PrefillBackend,
)
from megatron_async.ops.attention.backends.flash_attn_3 import FlashAttention3Prefill
from megatron_async.ops.attention.backends.flash_attn_4 import FlashAttention4Prefill
from megatron_async.ops.attention.backends.prefill_choice import STEP_CLASSES, PrefillChoice
from megatron_async.ops.attention.backends.timing import time_backend
from megatron_async.ops.attention.backends.torch_backend import TorchPrefill
from megatron_async.ops.attention.backends.triton_backend import TritonPrefill
from megatron_async.ops.attention.backends.warpgroup_backend import WarpgroupPrefill

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[AttentionShape], PrefillBackend]] = {
    "triton": TritonPrefill,
    "warpgroup": WarpgroupPrefill,
    "flash_attn_4": FlashAttention4Prefill,
    "flash_attn_3": FlashAttention3Prefill,
    "torch": TorchPrefill,
}
"""By name in `InferenceConfig.attention_backend`."""
CANDIDATES = ("triton", "warpgroup", "flash_attn_4", "flash_attn_3")
"""Backends to choose from; torch is a reference, and never the fastest."""

WORTH = 0.95
"""Another backend is chosen if it takes at most so much of the time of the first one in
`CANDIDATES`. Otherwise noise would choose where two are as fast: another one at each start, and
with it other roundings."""

_measured: dict[AttentionShape, tuple[tuple[dict[str, float], ...], tuple[str, ...]]] = {}
"""Times of this process, by shape (which names the device)."""


def choose_prefill(
    name: str | None,
    shape: AttentionShape,
    device: Device,
    agree_on_least: Callable[[int], int] = int,
) -> PrefillChoice:
    """The backends of an engine's prefill steps.

    Args:
        name: of `BACKENDS`, for every step; None chooses by measurement where there is more than
            one candidate.
        shape: of the engine's attention.
        device: a GPU.
        agree_on_least: gives the least of a number over all ranks of the model.

    Raises:
        BackendUnavailable: the requested backend is not supported; names the reason and the remedy.
        ConfigurationError: there is no backend of this name.
    """
    if name is not None:
        if name not in BACKENDS:
            raise ConfigurationError(
                f"attention_backend={name!r} is unknown: use one of {', '.join(BACKENDS)}, or None."
            )
        return PrefillChoice.of_one(BACKENDS[name](shape))
    at_hand: dict[str, PrefillBackend] = {}
    for candidate in CANDIDATES:
        try:
            at_hand[candidate] = BACKENDS[candidate](shape)
        except BackendUnavailable as reason:
            logger.debug("%s", reason)
    # Ranks of one model capture the same steps, so they choose from what all of them have.
    at_hand = {
        candidate: at_hand[candidate]
        for candidate in CANDIDATES
        if agree_on_least(int(candidate in at_hand))
    }
    if len(at_hand) == 1:
        return PrefillChoice.of_one(*at_hand.values())
    if shape not in _measured:
        _measured[shape] = _measure(at_hand, shape, device)
    times, dropped = _measured[shape]
    backends = tuple(at_hand[_agreed_fastest(by_name, agree_on_least)] for by_name in times)
    return PrefillChoice(backends, times, dropped)


def _agreed_fastest(times: dict[str, float], agree_on_least: Callable[[int], int]) -> str:
    """The fastest backend by its microseconds (`WORTH`); where ranks of one model differ, the first
    in `CANDIDATES` of those that they name, or triton if it failed on one of them."""
    fastest = min(times, key=lambda name: times[name])
    if times[fastest] > WORTH * times[CANDIDATES[0]]:
        fastest = CANDIDATES[0]
    wanted = CANDIDATES[agree_on_least(CANDIDATES.index(fastest))]
    everywhere = agree_on_least(int(wanted in times))
    return wanted if everywhere else CANDIDATES[0]


def _measure(
    backends: dict[str, PrefillBackend], shape: AttentionShape, device: Device
) -> tuple[tuple[dict[str, float], ...], tuple[str, ...]]:
    """Microseconds a layer by class and backend, and what failed. If the first backend cannot be
    timed it serves all steps: a measurement is no reason to fail."""
    times: tuple[dict[str, float], ...] = tuple({} for _ in STEP_CLASSES)
    dropped: list[str] = []
    for name, backend in backends.items():
        try:
            found = [
                time_backend(backend, shape, device, [(c.query, c.kv)], c.decode_rows)
                for c in STEP_CLASSES
            ]
        except Exception as error:
            logger.warning("attention backend %s could not be timed", name, exc_info=error)
            why = f"({type(error).__name__}: {error})"
            if name == CANDIDATES[0]:
                return tuple({name: 0.0} for _ in STEP_CLASSES), (f"nothing was timed {why}",)
            dropped.append(f"{name} failed {why}")
            continue
        for by_name, microseconds in zip(times, found, strict=True):
            by_name[name] = microseconds
    return times, tuple(dropped)
