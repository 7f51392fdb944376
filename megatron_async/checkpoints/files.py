"""JSON objects and names in files, folders to write to, and which folder of a Megatron training run
holds the checkpoint, in which format. This module does not import torch.

`--save FOLDER` of Megatron-LM (`megatron/training/checkpointing.py`) leaves `iter_0000100` and so
on, or `release`, and a tracker file that names the last one. Formats (`--ckpt-format`) are told
apart by what is in such a folder; of them `torch_dist` is read.
"""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.json_objects import read_object
from megatron_async.models.sizes import size_problem


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: missing, too large, not JSON, or not an object.
    """
    return read_object(path, CheckpointError)


def check_size(value: Any, key: str, where: str) -> int:
    """A size that was read from a file (`where`): a positive integer, no larger than any
    model's."""
    problem = size_problem(key, value)
    if problem:
        raise CheckpointError(f"{where}: {key} = {value!r:.200} {problem}")
    return int(value)


def check_number(value: Any, key: str, where: str) -> float:
    """A positive finite number that was read from a file (`where`)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise CheckpointError(f"{where}: {key} = {value!r:.200} must be a positive number")
    return float(value)


def is_inside(name: str) -> bool:
    """Whether a name in a file names a file in the same folder or below. Where that file is a
    link, as in Hugging Face's cache, is the owner's choice and not the file's."""
    if not name or "\0" in name:
        return False
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


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
    """The folder with the `torch_dist` checkpoint: the given one, of an iteration, or that which a
    training folder's tracker names.

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
