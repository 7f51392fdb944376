"""Messages of a replica to the coordinator about its engine (description, model card and load), and
about requests that have ended."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.planning.request_slots import SlotState
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
)
from megatron_async.serving.connection import Outlet
from megatron_async.serving.messages import (
    UNREADABLE,
    UNSENDABLE,
    Ended,
    PromptLogProbs,
    ReplicaInfo,
    ReplicaStatus,
    RoutingRows,
    Span,
    StepTokens,
)
from megatron_async.serving.model_card import ModelCard
from megatron_async.text.tokenizer import Tokenizer


def status_of(
    engine: DynamicInferenceEngine, runs_seen: int, figures: dict[str, float]
) -> ReplicaStatus:
    """The answer to a ping. `figures`: `engine.stats()`, or a part of it."""
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
        is_torn=bool(engine.updating.torn),
    )


def describe(
    engine: DynamicInferenceEngine,
    model: str,
    name: str | None,
    shares_experts: bool,
    card: str = "",
) -> ReplicaInfo:
    """The description of a replica for the coordinator."""
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
        windows=engine.context.slots.needs.windows,
        shares_experts=shares_experts,
        card=card,
    )


def ended_of(request: DynamicInferenceRequest, replica: str, tells_prompt: bool) -> Ended:
    """How an engine's request ended, but for its generated tokens."""
    error, prompt = request.error, request.prompt_tokens
    return Ended(
        request.request_id,
        request.finish_reason,
        None if error is None else (type(error).__name__, str(error)),
        request.stop_words_from,
        len(prompt),
        request.num_cached_tokens,
        len(request.generated_tokens),
        prompt.astype(np.int32).tobytes() if tells_prompt else None,
        _prompt_log_probs(request),
        request.ttft,
        request.latency,
        _queue_s(request),
        replica=replica,
        weight_versions=_named(request.weight_versions),
        kv_versions=_named(request.kv_versions),
        routing=_routing(request),
    )


def _routing(request: DynamicInferenceRequest) -> RoutingRows | None:
    rows = request.routing_indices if request.sampling_params.return_routing else None
    if rows is None:
        return None
    tokens, layers, experts = rows.shape
    dtype: Literal["uint8", "uint16"] = "uint8" if rows.itemsize == 1 else "uint16"
    return RoutingRows((tokens, layers, experts), dtype, rows.tobytes())


def _named(spans: Sequence[Span]) -> list[Span] | None:
    """Spans of versions, unless the weights never had a name."""
    return None if all(version is None for version, _, _ in spans) else list(spans)


def failed_of(number: int, error: Exception, replica: str) -> Ended:
    """The end of a request that this replica cannot serve, or whose answer it cannot write."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, UNREADABLE):
        kind, text = "RequestError", f"sampling_params: {error}"
    return Ended(number, "error", (kind, text), replica=replica)


def _queue_s(request: DynamicInferenceRequest) -> float | None:
    """Seconds before a request had its first slot, None if it had none."""
    times = {event.type: event.timestamp for event in reversed(request.events)}
    added = times.get(DynamicInferenceEventType.ADD_ENGINE)
    admitted = times.get(DynamicInferenceEventType.ADD_CONTEXT)
    return None if added is None or admitted is None else max(admitted - added, 0.0)


def _prompt_log_probs(request: DynamicInferenceRequest) -> PromptLogProbs | None:
    if request.log_probs is None:
        return None
    found = request.log_probs.prompt_words()
    if found is None:
        return None
    top_n, words = found
    return PromptLogProbs(top_n, words.tobytes())


def send_news(connection: Outlet, news: StepTokens, name: str) -> None:
    """Tell of steps. An end that cannot be sent is told as one, and nothing else is lost."""
    try:
        connection.send(news)
    except UNSENDABLE:  # all of it together, or one alone
        connection.send(msgspec.structs.replace(news, ends=[]))
        for ended in news.ends:
            _send_alone(connection, ended, name)


def _send_alone(connection: Outlet, ended: Ended, name: str) -> None:
    try:
        connection.send(StepTokens(ends=[ended]))
    except UNSENDABLE as error:
        text = f"the answer cannot be sent: {error}. Ask for fewer log probs or tokens."
        failed = Ended(ended.number, "error", ("RequestError", text), replica=name)
        connection.send(StepTokens(ends=[failed]))


def card_of(engine: DynamicInferenceEngine, model: str, tokenizer: Any = None) -> ModelCard:
    """The card of an engine's model, for clients. `tokenizer`: the same as the engine's, in a form
    that can be sent; None: the engine's."""
    config, tokenizer = engine.context.config, tokenizer or engine.controller.tokenizer
    card = ModelCard(
        model=model,
        max_sequence_length=config.max_sequence_length,
        vocab_size=engine.controller.vocab_size,
        block_size_tokens=config.block_size_tokens,
        num_speculative_tokens=config.num_speculative_tokens,
        batch_invariant_mode=config.batch_invariant_mode,
        **_tokenizer_fields(tokenizer),
    )
    digest = hashlib.blake2b(card.encode(), digest_size=16).hexdigest()
    device = engine.context.device.torch_device.type
    return msgspec.structs.replace(card, digest=digest, device=device)


def _tokenizer_fields(tokenizer: Any) -> dict[str, Any]:
    """The fields that a tokenizer fills in; none for one of a class that others do not have."""
    if type(tokenizer) is not Tokenizer:
        return {"replica_makes_text": tokenizer is not None}
    return {
        "tokenizer_json": tokenizer.backend.to_str().encode(),
        "tokenizer_config": _plain(tokenizer.config),
        "chat_template": tokenizer.chat_template,
        "eos_ids": list(tokenizer.eos_ids),
        "generation_config": _plain(tokenizer.generation_config),
    }


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """What JSON has of some fields; files of tokenizers have nothing else. 10**30, transformers'
    word for no limit, is no integer of a message, and becomes a float."""
    text = json.dumps(fields, default=str)
    plain: dict[str, Any] = json.loads(text, parse_int=_number)
    return plain


def _number(text: str) -> int | float:
    return int(text) if len(text) < 19 else float(text)
