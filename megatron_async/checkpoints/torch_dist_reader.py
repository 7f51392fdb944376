"""Reading tensors and objects of a torch distributed checkpoint, without a process group.

torch's reader is told which regions of stored tensors go where; what else the checkpoint holds
(optimizer states, random states) is never read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, override

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.iteration_folders import INDEX
from megatron_async.checkpoints.json_files import is_inside
from megatron_async.checkpoints.mapping import Shape
from megatron_async.checkpoints.pickled import METADATA_CLASSES, PlainUnpickler


class TorchDistReader:
    """The content of a folder in torch's distributed checkpoint format.

    Args:
        folder: with `.metadata` and `.distcp` files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Every stored tensor by its key, those of the optimizer too.

        Raises:
            CheckpointError: the index is missing or damaged.
        """
        stored = self._metadata.state_dict_metadata
        return {key: v for key, v in stored.items() if isinstance(v, TensorStorageMetadata)}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Global shape of every stored tensor by its key."""
        return {key: tuple(item.size) for key, item in self.tensors.items()}

    def has_object(self, key: str) -> bool:
        """Whether something other than a tensor is stored under a key."""
        return isinstance(self._metadata.state_dict_metadata.get(key), BytesStorageMetadata)

    def read_object(self, key: str) -> bytes:
        """The file that `torch.save` wrote of an object.

        Raises:
            CheckpointError: see `read`.
        """
        planner = DirectPlanner()
        planner.add_bytes(key)
        self.read(planner)
        return planner.bytes[key]

    def read(self, planner: DirectPlanner) -> None:
        """Read what was added to a planner.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            reader.read_data(LoadPlan(planner.items), planner).wait()
        except Exception as error:  # as for `_metadata`, which says where in the files to read
            raise CheckpointError(
                f"{self.folder}: cannot be read; a .distcp file is missing, truncated or corrupt "
                f"({str(error) or type(error).__name__})"
            ) from error

    @cached_property
    def _metadata(self) -> Metadata:
        file = self.folder / INDEX
        try:
            with file.open("rb") as stream:  # torch's own reader would run what a pickle names
                metadata: Metadata = PlainUnpickler(stream, METADATA_CLASSES).load()
            _check_metadata(metadata)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file}: is missing; the checkpoint is incomplete") from error
        except Exception as error:  # a pickle, and there damaged bytes can raise anything
            why = str(error) or type(error).__name__
            raise CheckpointError(
                f"{file}: truncated or corrupt ({why}); copy the checkpoint again"
            ) from error
        metadata.storage_meta = StorageMeta()
        return metadata


class DirectPlanner(DefaultLoadPlanner):
    """Reads regions of stored tensors into given tensors, converting dtype and device."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[ReadItem] = []
        self.bytes: dict[str, bytes] = {}
        self.bar: Any = None
        self._targets: dict[MetadataIndex, Tensor] = {}

    def add(
        self,
        key: str,
        offset: list[int],
        target: Tensor,
        stored: TensorStorageMetadata,
        where: str,
    ) -> None:
        """Read the region of `key` that begins at `offset` and has the shape of `target`.

        Raises:
            CheckpointError: not all of the region was saved.
        """
        if not target.numel():
            return
        region = ChunkStorageMetadata(torch.Size(offset), target.size())
        items = create_read_items_for_chunk_list(key, stored, [region])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise CheckpointError(f"{where}: parts of tensor {key!r} were never saved")
        self.items += items
        self._targets[items[0].dest_index] = target

    def add_bytes(self, key: str) -> None:
        """Read what is stored under `key` and is not a tensor into `self.bytes[key]`."""
        index, nothing = MetadataIndex(key), torch.Size((0,))
        self.items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes of a stored object, which is no tensor."""
        self.bytes[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the parameter that one stored chunk fills."""
        part = self._targets[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to copy back: `tensor` is a view of the parameter."""
        if self.bar is not None:
            self.bar.update(tensor.nbytes)


def _check_metadata(metadata: Any) -> None:
    """Raise if this is not what torch writes: a pickle reads damaged bytes as other values."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__} and not torch's Metadata")
    for key, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            continue
        if not isinstance(key, str) or not isinstance(item, TensorStorageMetadata):
            raise TypeError(f"{key!r} is a {type(item).__name__} and no tensor")
        shapes = [item.size, *(n for chunk in item.chunks for n in (chunk.offsets, chunk.sizes))]
        if not all(isinstance(shape, torch.Size) for shape in shapes):
            raise TypeError(f"the shape of {key!r} is none")
        if not isinstance(item.properties.dtype, torch.dtype):
            raise TypeError(f"the dtype of {key!r} is none")
    for place in metadata.storage_data.values():
        if not isinstance(place.relative_path, str) or not is_inside(place.relative_path):
            raise ValueError(f"it names {place.relative_path!r}, which is no file of this folder")
