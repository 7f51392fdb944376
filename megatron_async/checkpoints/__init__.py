"""Models on disk: open, describe, load, convert.

A reader for each format (GGUF, Hugging Face, Megatron's torch_dist). Layers are in `models/`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_async.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_async.checkpoints.registry import LoadedModel, load_model, open_model
    from megatron_async.checkpoints.source import ModelSource

__all__ = ["CheckpointError", "LoadedModel", "ModelSource", "load_model", "open_model"]

# Imported on first use: whether a name can be a model's is told without torch (`model_names`).
_EXPORTS = {
    "LoadedModel": "registry",
    "load_model": "registry",
    "open_model": "registry",
    "ModelSource": "source",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
