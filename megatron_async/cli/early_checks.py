"""What can be told before torch is imported, which takes seconds: wrong names and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.text.structured_output import StructuredOutput

UNIMPLEMENTED = "Unimplemented keys"
"""llguidance's words for keywords of JSON Schema that it does not know."""
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_early(model: str, engine: Mapping[str, Any]) -> None:
    """Check a model's name and an engine's settings, as far as they tell by themselves.

    Args:
        model: name or path.
        engine: settings by their names in `InferenceConfig`.

    Raises:
        CheckpointError: the name can be no model's.
        ConfigurationError: a setting out of range, or a device of an unknown form.
    """
    from megatron_async.checkpoints.model_names import check_model_name
    from megatron_async.config import InferenceConfig
    from megatron_async.errors import ConfigurationError

    check_model_name(model)
    device = engine.get("device")
    if device is not None and not DEVICE.fullmatch(device):
        raise ConfigurationError(f"device={device!r} is unknown: use 'cpu', 'cuda' or 'cuda:N'.")
    InferenceConfig(**engine)


def check_structure(option: str, structure: StructuredOutput) -> None:
    """Check what answers are to be held to: each prompt would fail, after the model is loaded.

    Args:
        option: it was given by.
        structure: a schema, an expression, a grammar or a choice.

    Raises:
        ValueError: llguidance cannot compile it; its own words say why.
    """
    from llguidance import LLMatcher

    if reason := LLMatcher.validate_grammar(structure.source()):
        hint = ""
        if UNIMPLEMENTED in reason:
            hint = " (llguidance cannot hold an answer to these keywords: leave them out)"
        raise ValueError(f"{option}: {reason.strip()}{hint}")
