"""Megatron `torch_dist` checkpoints: ours, and those that Megatron-LM training writes.

Read with torch's own distributed checkpoint reader, straight into the model's parameters: it needs
no process group, and a checkpoint saved by many ranks is one global tensor to it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.json_files import read_json, write_json
from megatron_async.checkpoints.mapping import Shape, Shard, Weight, mtp_weights, weights
from megatron_async.checkpoints.megatron_args import architecture_from_args
from megatron_async.checkpoints.source import (
    ModelSource,
    byte_bar,
    check_mtp_names,
    check_shapes,
    clear_padding,
    model_parameters,
    total_bytes,
)
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

ARCHITECTURE = "architecture.json"
METADATA = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
BACKEND = "torch_dist"
EMBEDDING = "embedding.word_embeddings.weight"
COMMON_KEY = "common_state/shard_0_1"
COMMON_FILE = "common.pt"
"""Where what is not a tensor is kept: the key since Megatron-Core 0.19, the file before it."""

NORM_OF_EXPERTS = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
"""The norm before experts, and its name where training used Megatron's local layer spec."""

REMEDY = (
    f"place an {ARCHITECTURE} beside it (the fields of megatron_async.models.architecture."
    "ModelArchitecture as a JSON object)"
)

UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError)
"""What torch raises while it reads damaged training arguments."""


class TorchDistSource(ModelSource):
    """A Megatron `torch_dist` folder, or the training folder above it."""

    format = "torch_dist"

    def __init__(self, folder: Path, name: str | None = None) -> None:
        super().__init__(name or str(folder))
        self.folder = _iteration_folder(folder)
        backend = read_json(self.folder / METADATA).get("sharded_backend")
        if backend != BACKEND:
            raise CheckpointError(
                f"{self.folder / METADATA}: sharded_backend = {backend!r} is not supported (only "
                f"{BACKEND!r}); convert it with Megatron-LM (--dist-ckpt-format torch_dist)"
            )

    @cached_property
    def architecture(self) -> ModelArchitecture:
        """From `architecture.json` (ours), else from the arguments of the training run."""
        file = self.folder / ARCHITECTURE
        if file.is_file():
            try:
                return ModelArchitecture.from_dict(read_json(file))
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"{file}: not a ModelArchitecture ({error})") from error
        args = self._common_state.get("args")
        if args is None:
            raise CheckpointError(
                f"{self.folder}: says nothing about the model's architecture; {REMEDY}"
            )
        if EMBEDDING not in self._stored:
            raise CheckpointError(f"{self.folder}: tensor {EMBEDDING!r} is missing; {REMEDY}")
        return architecture_from_args(
            vars(args),
            vocab_size=self._stored[EMBEDDING].size[0],
            eos_token_ids=self.tokenizer.eos_ids if self.tokenizer else (),
            where=f"{self.folder} (training arguments)",
        )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """See `ModelSource.tokenizer`."""
        return Tokenizer.from_folder(self.folder) if Tokenizer.is_in(self.folder) else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """See `ModelSource.dtype`."""
        keys = {
            self._places[weight.stored + suffix][0]
            for weight in weights(self.architecture)
            if not weight.is_float32
            for suffix in weight.stored_suffixes
        }
        return reduce(
            torch.promote_types, (self._stored[key].properties.dtype for key in sorted(keys))
        )

    def load_weights(self, model: nn.Module, progress: bool = False) -> None:
        """See `ModelSource.load_weights`."""
        shard = Shard.of(model)
        places = self._places | (self._mtp_places if shard.with_mtp else {})
        wanted = list(weights(self.architecture, shard))
        parameters = model_parameters(model, wanted)
        planner = _DirectPlanner()
        for weight in wanted:
            parameter = parameters[weight.name]
            clear_padding(weight, parameter)
            for suffix, offset, target in weight.stored_pieces(parameter):
                key, stacked = places[weight.stored + suffix]
                if stacked:
                    target, offset = target.unsqueeze(0), [weight.layer or 0, *offset]
                planner.add(key, offset, target, self._stored[key], str(self.folder))
        with byte_bar(total_bytes(parameters), progress) as bar:
            planner.bar = bar
            self._read(planner)

    @cached_property
    def _places(self) -> dict[str, tuple[str, bool]]:
        """`Weight.stored` with one of its suffixes -> its key here, and whether all layers are
        stacked under that key."""
        found, layers = self._shapes, self.architecture.num_layers
        expected: dict[str, Shape] = {}
        places = {}
        for stored, (key, shape, stacked) in self._keys(weights(self.architecture)).items():
            places[stored] = (key, stacked)
            expected[key] = (layers, *shape) if stacked else shape
        check_shapes(str(self.folder), expected, found)
        # Optimizer states are other tensors; a decoder weight that nobody wants is a missing part
        # of the model.
        extra = [key for key in found if key.startswith("decoder.") and key not in expected]
        if extra:
            raise CheckpointError(
                f"{self.folder}: tensor {min(extra)!r} (one of {len(extra)}) is not part of a "
                f"{layers}-layer {self.architecture.model_type} model"
            )
        return places

    @cached_property
    def _mtp_places(self) -> dict[str, tuple[str, bool]]:
        """Of each stored tensor of multi-token prediction its key in the model, and that it is not
        stacked."""
        keys = self._keys(mtp_weights(self.architecture))
        expected = {key: shape for key, shape, _stacked in keys.values()}
        check_mtp_names(str(self.folder), expected, self._shapes)
        check_shapes(str(self.folder), expected, self._shapes)
        return {stored: (key, False) for stored, (key, _shape, _stacked) in keys.items()}

    @property
    def has_mtp_weights(self) -> bool:
        """Whether any weight of multi-token prediction is stored."""
        keys = self._keys(mtp_weights(self.architecture)).values()
        return any(key in self._shapes for key, _shape, _stacked in keys)

    def _keys(self, wanted: Iterable[Weight]) -> dict[str, tuple[str, Shape, bool]]:
        """`Weight.stored` with one of its suffixes -> its key here, the shape of one layer, and
        whether all layers are stacked under that key."""
        found = self._shapes
        first = next(w for w in weights(self.architecture) if w.layer is not None)
        stacked = first.stored_stacked in found
        gpt = stacked or "decoder.final_layernorm.weight" in found
        keys = {}
        for weight in wanted:
            inside = stacked and weight.layer is not None
            name = weight.stored_stacked if inside else weight.stored_gpt if gpt else weight.stored
            for suffix, shape in weight.stored_suffixes.items():
                key = name + suffix
                other_name = key.replace(*NORM_OF_EXPERTS)
                if key not in found and other_name in found:
                    key = other_name
                keys[weight.stored + suffix] = (key, shape, inside)
        return keys

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {key: tuple(item.size) for key, item in self._stored.items()}

    @cached_property
    def _metadata(self) -> Metadata:
        file = self.folder / ".metadata"
        try:
            metadata = self._reader.read_metadata()
            _check_metadata(metadata)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file}: is missing; the checkpoint is incomplete") from error
        except Exception as error:  # a pickle, and there damaged bytes can raise anything
            why = str(error) or type(error).__name__
            raise CheckpointError(
                f"{file}: truncated or corrupt ({why}); copy the checkpoint again"
            ) from error
        return metadata

    @cached_property
    def _stored(self) -> Mapping[str, TensorStorageMetadata]:
        stored = self._metadata.state_dict_metadata
        return {key: v for key, v in stored.items() if isinstance(v, TensorStorageMetadata)}

    @property
    def _reader(self) -> FileSystemReader:
        return FileSystemReader(self.folder)

    def _read(self, planner: _DirectPlanner) -> None:
        reader = self._reader
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            reader.read_data(LoadPlan(planner.items), planner).wait()
        except Exception as error:  # as for `_metadata`, which says where in the files to read
            raise CheckpointError(
                f"{self.folder}: cannot be read; a .distcp file is missing, truncated or corrupt "
                f"({str(error) or type(error).__name__})"
            ) from error

    @property
    def _common_state(self) -> Mapping[str, Any]:
        """What Megatron saved beside the tensors; empty if there is nothing."""
        stored = self._metadata.state_dict_metadata.get(COMMON_KEY)
        if isinstance(stored, BytesStorageMetadata):
            planner = _DirectPlanner()
            planner.add_bytes(COMMON_KEY)
            self._read(planner)
            return _load_common(io.BytesIO(planner.bytes[COMMON_KEY]), self.folder)
        file = self.folder / COMMON_FILE
        return _load_common(io.BytesIO(file.read_bytes()), file) if file.is_file() else {}


def save_torch_dist(
    model: HybridModel,
    architecture: ModelArchitecture,
    tokenizer: Tokenizer | None,
    folder: Path,
) -> None:
    """Write a checkpoint that `megatron.core.dist_checkpointing.load` and `TorchDistSource` read.

    Args:
        model: a `HybridModel` of `architecture`; its weights are written in its dtype, those of
            multi-token prediction where it has them.
        architecture: written beside it as `architecture.json`.
        tokenizer: its files are written too, if there is one.
        folder: made if needed; must be empty.
    """
    from megatron.core import dist_checkpointing

    from megatron_async.checkpoints.torch_dist_strategy import SynchronousSaveStrategy

    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(
        model.sharded_state_dict(prefix=""), str(folder), SynchronousSaveStrategy()
    )
    written = architecture if Shard.of(model).with_mtp else architecture.without_mtp
    write_json(folder / ARCHITECTURE, written.to_dict())
    if tokenizer is not None:
        tokenizer.save(folder)


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder holds a Megatron distributed checkpoint, or training wrote one below it."""
    return (folder / METADATA).is_file() or (folder / TRACKER).is_file()


class _DirectPlanner(DefaultLoadPlanner):
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
        """Read the region of `key` that begins at `offset` and has the shape of `target`."""
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

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `LoadPlanner.load_bytes`."""
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


def _iteration_folder(folder: Path) -> Path:
    """The checkpoint that a training folder's tracker file names, or the folder itself."""
    tracker = folder / TRACKER
    if (folder / METADATA).is_file() or not tracker.is_file():
        return folder
    iteration = tracker.read_text(encoding="utf-8").strip()
    name = f"iter_{int(iteration):07}" if iteration.isdigit() else iteration
    if not (folder / name / METADATA).is_file():
        raise CheckpointError(
            f"{tracker} names iteration {iteration!r}, but {folder / name} is no distributed "
            "checkpoint; give the folder of an iteration that is"
        )
    return folder / name


def _load_common(data: io.BytesIO, where: Path) -> Mapping[str, Any]:
    from megatron.core.safe_globals import SAFE_GLOBALS

    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            state = torch.load(data, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{where}: the training arguments cannot be read ({error}); {REMEDY}"
        ) from error
    # A sharded object holds one entry for each shard, here one.
    state = state[0] if isinstance(state, list) else state
    return state if isinstance(state, Mapping) else {}
