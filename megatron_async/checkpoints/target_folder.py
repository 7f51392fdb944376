"""What a folder to write a model to must be. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

from megatron_async.checkpoints.errors import CheckpointError

OF_MODELS = ("config.json", "metadata.json")
"""A folder with one of these files holds a model (of Hugging Face, or a torch_dist checkpoint)."""


def check_target(target: Path, overwrite: bool) -> None:
    """Check that a model may be written to a folder.

    Raises:
        CheckpointError: a file; a folder that is not empty, without `overwrite`; or one that holds
            something other than a model.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; name a folder to write to")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target}: is not empty; choose another folder, or ask to overwrite it (--overwrite)"
        )
    if not any((target / name).is_file() for name in OF_MODELS):
        raise CheckpointError(f"{target}: holds something other than a model; not overwritten")
