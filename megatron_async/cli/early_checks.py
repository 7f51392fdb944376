"""What can be told before torch is imported, which takes seconds: wrong names and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_async.cli.files import check_readable

if TYPE_CHECKING:
    from megatron_async.text.structured_output import StructuredOutput

UNIMPLEMENTED = "Unimplemented keys"
"""llguidance's words for keywords of JSON Schema that it does not know."""
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_early(
    model: str | None,
    engine: Mapping[str, Any],
    sizes: Mapping[str, Any] | None = None,
    draft_layer: str | None = None,
) -> None:
    """Check a model's name and an engine's settings, as far as they tell by themselves.

    Args:
        model: name or path; None: it is elsewhere.
        engine: settings by their names in `InferenceConfig`.
        sizes: of `parallel_sizes`.
        draft_layer: a file of safetensors.

    Raises:
        CheckpointError: the name can be no model's, or nothing of the kind lies there.
        ConfigurationError: a setting out of range, or a device of an unknown form.
        ValueError: a file that is none.
    """
    from megatron_async.checkpoints.model_names import check_model_name
    from megatron_async.config import InferenceConfig
    from megatron_async.errors import ConfigurationError

    if model is not None:
        check_model_name(model)
    for name, value in (sizes or {}).items():
        if value < (0 if isinstance(value, bool) else 1):
            raise ConfigurationError(f"{name}={value} must be an integer of at least 1.")
    if draft_layer is not None:
        check_readable("--draft-layer", draft_layer)
        _check_safetensors("--draft-layer", draft_layer)
    device = engine.get("device")
    if device is not None and not DEVICE.fullmatch(device):
        raise ConfigurationError(f"device={device!r} is unknown: use 'cpu', 'cuda' or 'cuda:N'.")
    InferenceConfig(**engine)


def _check_safetensors(option: str, file: str) -> None:
    """The first bytes of safetensors: the length of a header, and the header's brace."""
    with open(file, "rb") as opened:
        begin = opened.read(9)
    if len(begin) < 9 or begin[8:] != b"{":
        raise ValueError(f"{option} {file}: that is no file of safetensors.")


def check_structure(option: str, structure: StructuredOutput) -> None:
    """Check what answers are to be held to: each prompt would fail, after the model is loaded.

    Raises:
        ValueError: llguidance cannot compile it; its own words say why.
    """
    from llguidance import LLMatcher

    if reason := LLMatcher.validate_grammar(structure.source()):
        hint = ""
        if UNIMPLEMENTED in reason:
            hint = " (llguidance cannot hold an answer to these keywords: leave them out)"
        # Behind the first line stand the text with a caret, and the parser's own word.
        first, *rest = reason.strip().splitlines()
        said = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
        raise ValueError(f"{option}: {' '.join([first, *said])}{hint}")
