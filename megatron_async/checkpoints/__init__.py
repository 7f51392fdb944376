"""Models on disk: open, describe, load, convert."""

from __future__ import annotations

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.registry import LoadedModel, load_model, open_model
from megatron_async.checkpoints.source import ModelSource

__all__ = ["CheckpointError", "LoadedModel", "ModelSource", "load_model", "open_model"]
