"""What a replica tells the coordinator of its engine: what it is, and how much it has to do."""

from __future__ import annotations

import os
import secrets
import socket

import numpy as np

from megatron_async.contexts.request_slots import SlotState
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.serving.messages import ReplicaInfo, ReplicaStatus


def status_of(
    engine: DynamicInferenceEngine, runs_seen: int, figures: dict[str, float]
) -> ReplicaStatus:
    """The answer to a ping.

    Args:
        engine: of the replica.
        runs_seen: requests that it was sent so far.
        figures: `engine.stats()`, or as much of them as somebody wants to see.
    """
    slots = engine.context.slots
    held = slots.state != SlotState.FREE
    # Of a prompt under way, what is prefilled counts less; of an answer, what is booked.
    done = np.where(slots.state == SlotState.PREFILLING, slots.num_prefilled, slots.num_known)
    running = int((slots.max_length - done)[held].sum())
    cache = engine.context.prefix_cache
    waiting = sum(entry.max_length for entry in engine.context.waiting.in_order())
    return ReplicaStatus(
        runs_seen=runs_seen,
        unfinished_tokens=running + waiting,
        free_blocks=engine.context.blocks.allocatable,
        resolved_steps=engine.statistics.resolved_steps,
        is_stopped=engine.is_stopped,
        engine=figures,
        lost_blocks=[] if cache is None else cache.take_lost(),
    )


def describe(
    engine: DynamicInferenceEngine, model: str, name: str | None, shares_experts: bool
) -> ReplicaInfo:
    """What a replica tells the coordinator of itself."""
    config = engine.context.config
    return ReplicaInfo(
        name=name or f"{socket.gethostname()}:{os.getpid()}",
        instance=secrets.token_hex(8),
        model={
            "model": model,
            "vocab_size": engine.controller.vocab_size,
            "max_sequence_length": config.max_sequence_length,
            "inference_sampling_seed": config.inference_sampling_seed,
            "block_size_tokens": config.block_size_tokens,
        },
        slots=engine.context.max_requests,
        kv_blocks=engine.context.blocks.total,
        block_size_tokens=config.block_size_tokens,
        shares_experts=shares_experts,
    )
