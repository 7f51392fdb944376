"""Reading tensors and objects of a torch distributed checkpoint, without a process group,
and the keys under which it holds a weight.

torch's reader is told which regions of stored tensors go where; what else the checkpoint holds
(optimizer states, random states) is never read.

Under which keys a Megatron checkpoint holds a weight, and which regions of them a rank reads.

Megatron-Core writes the same weight in several ways (`sharded_state_dict` of
`transformer/transformer_block.py`, `transformer/mlp.py` and `transformer/moe/experts.py`):

| model, and metadata of the save | key of a weight |
| --- | --- |
| `HybridModel` | `decoder.layers.3.`, a layer for each character of the pattern |
| `GPTModel` | `decoder.layers.1.`, a layer for two characters |
| `GPTModel`, `non_homogeneous_layers` False | `decoder.layers.`, all layers in one tensor |
| `singleton_local_shards` True | gate and up apart, `weight_w` and `weight_v`; a key an expert |
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from megatron_async.checkpoints.files import INDEX, is_inside
from megatron_async.checkpoints.mapping import Shape, Weight
from megatron_async.checkpoints.pickled import METADATA_CLASSES, PlainUnpickler

NORM_OF_EXPERTS = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
"""The norm before experts, and its name where training used Megatron's local layer spec."""
EXPERTS = ".experts.experts."
HALVES = ("_w", "_v")
"""Behind the key of gate and of up, where each has a key of its own."""
FINAL_NORM = "decoder.final_layernorm.weight"
"""Only a `GPTModel` has a weight of this name."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight, or one strip of it, as a checkpoint holds it."""

    key: str
    """Key of the whole weight; it is not in the checkpoint if the weight is in several tensors."""
    shape: Shape
    """Shape of the whole weight."""
    layer: int | None = None
    """Place on the first axis of a tensor that holds all layers; None: of this layer alone."""
    num_layers: int = 0
    """On that axis."""
    is_each_expert: bool = False
    """Every expert, the first axis of the weight, is stored by itself."""
    is_halved: bool = False
    """Gate and up, the halves of its rows, are stored apart."""

    @property
    def tensors(self) -> dict[str, Shape]:
        """The stored tensors of which it consists, by their key."""
        shape = self.shape
        keys = [self.key]
        if self.is_each_expert:
            keys = [self._of_expert(expert) for expert in range(shape[0])]
            shape = shape[1:]
        if self.is_halved:
            keys = [key + half for key in keys for half in HALVES]
            shape = (shape[0] // 2, *shape[1:])
        if self.layer is not None:
            shape = (self.num_layers, *shape)
        return dict.fromkeys(keys, shape)

    def pieces(self, offset: list[int], target: Tensor) -> Iterator[tuple[str, list[int], Tensor]]:
        """Where a region of the weight is stored, which begins at `offset` and has the shape of
        `target`: the key of a tensor; where in it a region begins; the view of `target` that the
        region fills."""
        if not self.is_each_expert:
            yield from self._halves(self.key, offset, target)
            return
        for number, expert in enumerate(target):
            yield from self._halves(self._of_expert(offset[0] + number), offset[1:], expert)

    def _of_expert(self, expert: int) -> str:
        return self.key.replace(EXPERTS, f"{EXPERTS}{expert}.")

    def _halves(
        self, key: str, offset: list[int], target: Tensor
    ) -> Iterator[tuple[str, list[int], Tensor]]:
        if not self.is_halved:
            if self.layer is not None:
                offset, target = [self.layer, *offset], target.unsqueeze(0)
            yield key, offset, target
            return
        half = self.shape[1 if self.is_each_expert else 0] // 2
        first, last = offset[0], offset[0] + len(target)
        for number, suffix in enumerate(HALVES):
            start, stop = max(first, number * half), min(last, (number + 1) * half)
            if start < stop:
                place = target[start - first : stop - first]
                yield key + suffix, [start - number * half, *offset[1:]], place


def stored_weights(
    wanted: Iterable[Weight], num_layers: int, found: Mapping[str, Shape]
) -> dict[str, StoredWeight]:
    """How a checkpoint holds weights of a whole model: `Weight.stored` with one of its suffixes ->
    that. What is not there is given as a `HybridModel`, or a `GPTModel` if it is one, would have
    it. `num_layers`: characters of the pattern; `found`: the shape of each stored tensor."""
    wanted = list(wanted)
    is_stacked = any(w.gpt_layer is not None and w.stored_stacked in found for w in wanted)
    is_gpt = is_stacked or FINAL_NORM in found
    stored = {}
    for weight in wanted:
        layer = weight.gpt_layer if is_stacked else None
        name = weight.stored_gpt if is_gpt else weight.stored
        if layer is not None:
            name = weight.stored_stacked
        for suffix, shape in weight.stored_suffixes.items():
            key = _other_norm(name + suffix, found)
            one = StoredWeight(key, shape, layer, num_layers // 2)
            stored[weight.stored + suffix] = _split(one, found)
    return stored


def _other_norm(key: str, found: Mapping[str, Shape]) -> str:
    other = key.replace(*NORM_OF_EXPERTS)
    return other if key not in found and other in found else key


def _split(whole: StoredWeight, found: Mapping[str, Shape]) -> StoredWeight:
    """The way, of those that Megatron has, in which the weight is stored."""
    key, shape, layer, layers = whole.key, whole.shape, whole.layer, whole.num_layers
    for each in (False, EXPERTS in key):
        for halved in (False, True):
            way = StoredWeight(key, shape, layer, layers, each, halved)
            if next(iter(way.tensors)) in found:
                return way
    return whole


class TorchDistReader:
    """The content of a folder in torch's distributed checkpoint format (`.metadata`, `.distcp`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Every stored tensor by its key, those of the optimizer too."""
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
        """The file that `torch.save` wrote of an object."""
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
        """Read the region of `key` that begins at `offset` and has the shape of `target`; refused
        where not all of it was saved."""
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
