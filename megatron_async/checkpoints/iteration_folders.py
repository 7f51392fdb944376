"""Which folder of a Megatron training run holds the checkpoint, and in which format it is.

`--save FOLDER` of Megatron-LM (`megatron/training/checkpointing.py`) leaves `iter_0000100` and so
on, or `release`, and a tracker file that names the last one. Formats (`--ckpt-format`) are told
apart by what is in such a folder; of them `torch_dist` is read.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import read_json

METADATA = "metadata.json"
INDEX = ".metadata"
TRACKER = "latest_checkpointed_iteration.txt"
BACKEND = "torch_dist"
RELEASE = "release"
ITERATIONS = "iter_*"
LONGEST_TRACKER = 64
"""Bytes of it that are read: it has one number."""
LEGACY_RANKS = "mp_rank_*"
"""Folders of the format `torch`: one a rank, with `model_optim_rng.pt` in each."""

LEGACY_REMEDY = (
    "run Megatron-LM's training script on it with --ckpt-convert-format torch_dist "
    "--ckpt-convert-save FOLDER (its tools/checkpoint/convert.py writes no other format than this)"
)
SAVE_REMEDY = "save it with Megatron-LM's --ckpt-format torch_dist"


def is_megatron(folder: Path) -> bool:
    """Whether Megatron wrote this folder, or a checkpoint below it, in whichever format."""
    files = (METADATA, INDEX, TRACKER)
    if any((folder / name).is_file() for name in files):
        return True
    below = (path for kind in (LEGACY_RANKS, ITERATIONS) for path in folder.glob(kind))
    return any(path.is_dir() for path in below)


def checkpoint_folder(folder: Path) -> Path:
    """The folder with the `torch_dist` checkpoint: the given one, or that which its tracker names.

    Args:
        folder: of one iteration, or of the training run.

    Raises:
        CheckpointError: there is none, or it is in another format; the message says which.
    """
    if not (folder / METADATA).is_file():
        folder = _tracked(folder)
    if (folder / METADATA).is_file():
        backend = read_json(folder / METADATA).get("sharded_backend")
        if backend != BACKEND:
            raise CheckpointError(
                f"{folder / METADATA}: sharded_backend = {backend!r} is not supported (only "
                f"{BACKEND!r}); {SAVE_REMEDY}"
            )
        return folder
    legacy = sorted(folder.glob(LEGACY_RANKS))
    if legacy:
        raise CheckpointError(
            f"{folder}: holds {legacy[0].name}, so its format is 'torch' (one file a rank), which "
            f"is not supported (only {BACKEND!r}); {LEGACY_REMEDY}"
        )
    if (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder}: has {INDEX} but no {METADATA}, so its format is 'fsdp_dtensor' or "
            f"'torch_dcp' (only {BACKEND!r} is supported), or {METADATA} was not copied; copy it, "
            f"or {SAVE_REMEDY}"
        )
    raise CheckpointError(
        f"{folder}: holds no checkpoint ({METADATA} is missing); copy the checkpoint again, or "
        "give the folder of another iteration"
    )


def _tracked(folder: Path) -> Path:
    """The folder that a tracker file names, or the folder itself if it is one of an iteration."""
    tracker = folder / TRACKER
    found = _iterations(folder)
    there = f"; there are: {', '.join(found)}" if found else ""
    if not tracker.is_file():
        if found and not (folder / INDEX).is_file():
            raise CheckpointError(
                f"{folder}: has no {TRACKER}, which names the iteration; give the folder of an "
                f"iteration{there}"
            )
        return folder
    with tracker.open("rb") as file:
        text = file.read(LONGEST_TRACKER).decode("utf-8", "replace").strip()
    if text != RELEASE and not re.fullmatch("[0-9]{1,20}", text):
        raise CheckpointError(
            f"{tracker}: {text!r} is neither the number of an iteration nor {RELEASE!r}; give the "
            f"folder of an iteration{there}"
        )
    name = text if text == RELEASE else f"iter_{int(text):07}"
    if not (folder / name).is_dir():
        raise CheckpointError(
            f"{tracker} names iteration {text!r}, but {folder / name} is not there; give the "
            f"folder of an iteration that is{there}"
        )
    return folder / name


def _iterations(folder: Path) -> list[str]:
    """Names of the checkpoints below a training folder, the oldest first."""
    found = [path.name for path in sorted(folder.glob(ITERATIONS)) if path.is_dir()]
    return found + ([RELEASE] if (folder / RELEASE).is_dir() else [])
