"""safetensors of a Hugging Face folder: which file holds which tensor, and what else lies there.

transformers reads `model.safetensors` where there is one, else the files that the index names, and
of these every tensor. So do we; what lies beside them is told, and nothing is left to chance.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import is_inside, is_megatron, read_json
from megatron_async.checkpoints.safetensors_file import SafetensorsFile, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
)  # fmt: skip
"""Ends of names of files that may hold a model's weights."""
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "random_states", "scaler")
"""Beginnings of names of files that a trainer leaves: they have such ends, and hold its own state
and no weight."""


def has_weights(folder: Path) -> bool:
    """Whether a folder has any weights that `TensorFiles` reads."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


class TensorFiles:
    """The safetensors files of a folder, which are opened when needed. An adapter in it is
    refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, SafetensorsFile] = {}
        if (folder / ADAPTER).is_file():
            raise CheckpointError(
                f"{folder / ADAPTER}: the folder holds an adapter, which would change the model "
                "and is not applied; merge it (peft's merge_and_unload), or take it out"
            )

    @cached_property
    def file_of(self) -> dict[str, Path]:
        """The file that holds each tensor, by the name that is stored.

        Raises:
            CheckpointError: a file is missing or unreadable; the index names a file elsewhere, or
                two files hold different tensors of one name.
        """
        index = self._index
        if index is None:
            path = self.folder / SINGLE
            if path.is_file():
                return dict.fromkeys(self.open(path).tensors, path)
            old = sorted(file.name for file in self.folder.glob("*.bin"))
            hint = f" It holds {old[0]}: save it as safetensors first." if old else ""
            raise CheckpointError(f"{self.folder}: has neither {SINGLE} nor {INDEX}.{hint}")
        holders: dict[str, list[Path]] = {}
        for path in sorted(set(index.values())):
            stored = self.open(path).tensors
            lost = {name for name in index.keys() - stored.keys() if index[name] == path}
            if lost:
                raise CheckpointError(f"{path}: lacks tensor {min(lost)!r}, which {INDEX} names")
            for name in stored:
                holders.setdefault(name, []).append(path)
        for name, paths in holders.items():
            for other in paths[1:]:
                if not _are_equal(*(self.open(path).tensors[name] for path in (paths[0], other))):
                    raise CheckpointError(
                        f"{self.folder}: {paths[0].name} and {other.name} hold different tensors "
                        f"{name!r}; take one of them out"
                    )
        return {name: paths[0] for name, paths in holders.items()}

    def tensor(self, name: str) -> StoredTensor:
        """A stored tensor, of which nothing is read yet."""
        return self.open(self.file_of[name]).tensors[name]

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two stored tensors have the same dtype, shape and values."""
        return _are_equal(self.tensor(name), self.tensor(other))

    def passed_over(self) -> list[str]:
        """Files of the folder that look like weights and are not read, and checkpoints of other
        formats in it."""
        read = {path.name for path in self.file_of.values()}
        found = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name.endswith(WEIGHTS)
            and not path.name.startswith(NO_WEIGHTS)
            and path.name not in read
        )
        if self._index is None and (self.folder / INDEX).is_file():
            found.insert(0, INDEX)
        return found + (["a Megatron checkpoint"] if is_megatron(self.folder) else [])

    def open(self, path: Path) -> SafetensorsFile:
        """A file of the folder, opened."""
        if path not in self._open:
            if not path.is_file():
                raise CheckpointError(
                    f"{path}: is missing, though {INDEX} names it; fetch it again"
                )
            self._open[path] = SafetensorsFile(path)
        return self._open[path]

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if a file was written to since it was opened."""
        for file in self._open.values():
            file.check_unchanged()

    def close(self) -> None:
        """Close all files; they are opened again when needed."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    @cached_property
    def _index(self) -> dict[str, Path] | None:
        """Tensors and files that the index names; None where the single file is read."""
        file = self.folder / INDEX
        if not file.is_file():
            return None
        files = read_json(file).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise CheckpointError(f"{file}: has no weight_map")
        for name, value in files.items():
            if not isinstance(value, str) or not is_inside(value):
                raise CheckpointError(
                    f"{file}: tensor {name!r} is said to be in {value!r}, which is no file of this "
                    "folder; fetch the index again"
                )
        single = self.folder / SINGLE
        if single.is_file() and SINGLE not in files.values():
            return None
        return {name: self.folder / value for name, value in files.items()}


def _are_equal(one: StoredTensor, two: StoredTensor) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return all(map(torch.equal, one.pieces(), two.pieces()))
