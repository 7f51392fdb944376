"""The model card of an engine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.serving.model_card import ModelCard
from megatron_async.text.tokenizer import Tokenizer


def card_of(engine: DynamicInferenceEngine, model: str, tokenizer: Any = None) -> ModelCard:
    """The card of an engine's model, for clients.

    Args:
        engine: the engine that serves the model.
        model: name or path of the loaded model.
        tokenizer: the same as the engine's, in a form that can be sent; None: the engine's.
    """
    config, tokenizer = engine.context.config, tokenizer or engine.controller.tokenizer
    card = ModelCard(
        model=model,
        max_sequence_length=config.max_sequence_length,
        vocab_size=engine.controller.vocab_size,
        block_size_tokens=config.block_size_tokens,
        num_speculative_tokens=config.num_speculative_tokens,
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
    """What JSON has of some fields; files of tokenizers have nothing else."""
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain
