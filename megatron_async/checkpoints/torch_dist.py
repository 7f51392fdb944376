"""Megatron `torch_dist` checkpoints: ours, and those that Megatron-LM training writes.

Read with torch's own distributed checkpoint reader, straight into the model's parameters: it needs
no process group, and a checkpoint saved by many ranks is one global tensor to it.
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import METADATA, TRACKER, checkpoint_folder, read_json
from megatron_async.checkpoints.mapping import Shard, mtp_weights, weights
from megatron_async.checkpoints.megatron_args import architecture_from_args
from megatron_async.checkpoints.pickled import TrainingArguments, load_common_state
from megatron_async.checkpoints.source import (
    ModelSource,
    byte_bar,
    check_mtp_names,
    check_shapes,
    clear_padding,
    model_parameters,
    rounded_into,
    total_bytes,
)
from megatron_async.checkpoints.torch_dist_reader import (
    DirectPlanner,
    StoredWeight,
    TorchDistReader,
    stored_weights,
)
from megatron_async.checkpoints.weight import EXTRA_STATE, Weight
from megatron_async.json_objects import write_object
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.held_weight import Operand
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

logger = logging.getLogger("megatron_async")

__all__ = ["METADATA", "TorchDistSource", "save_torch_dist"]

ARCHITECTURE = "architecture.json"
EMBEDDING = "embedding.word_embeddings.weight"
COMMON_KEY = "common_state/shard_0_1"
COMMON_FILE = "common.pt"
"""Where what is not a tensor is kept: the key since Megatron-Core 0.19, the file before it."""
MODEL_PARTS = ("embedding.", "encoder.", "decoder.", "output_layer.")
"""Beginnings of the keys of a model's weights, but for multi-token prediction ("mtp.")."""
OPTIMIZER = re.compile(r"(chained_\d+\.)*optimizer\.")
"""Beginning of the keys of an optimizer's states, on which no answer depends."""

REMEDY = (
    f"place an {ARCHITECTURE} beside it (the fields of megatron_async.models.architecture."
    "ModelArchitecture as a JSON object)"
)


class TorchDistSource(ModelSource):
    """A Megatron `torch_dist` folder, or the training folder above it (`checkpoint_folder`)."""

    format = "torch_dist"

    def __init__(self, folder: Path, name: str | None = None) -> None:
        super().__init__(name or str(folder))
        self.folder = checkpoint_folder(folder)
        self._reader = TorchDistReader(self.folder)

    @cached_property
    def architecture(self) -> ModelArchitecture:
        """From `architecture.json` (ours), else from the arguments of the training run."""
        file = self.folder / ARCHITECTURE
        if file.is_file():
            try:
                return ModelArchitecture.from_dict(read_json(file))
            except CheckpointError:
                raise
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file}: not a ModelArchitecture ({error})") from error
        where = f"{self.folder} (training arguments)"
        args = self._training_arguments(where)
        if EMBEDDING not in self._reader.shapes:
            raise CheckpointError(f"{self.folder}: tensor {EMBEDDING!r} is missing; {REMEDY}")
        try:
            return architecture_from_args(
                args,
                vocab_size=self._reader.shapes[EMBEDDING][0],
                eos_token_ids=self.tokenizer.eos_ids if self.tokenizer else (),
                where=where,
            )
        except CheckpointError:
            raise
        except ValueError as error:  # of the architecture, which does not know the file
            raise CheckpointError(f"{where}: {error}") from error

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """From the folder of the iteration, or the training folder above it."""
        above = self.folder.parent
        folders = [self.folder, *([above] if (above / TRACKER).is_file() else [])]
        found = next((folder for folder in folders if Tokenizer.is_in(folder)), None)
        tokenizer = None if found is None else Tokenizer.from_folder(found)
        if tokenizer is not None and EMBEDDING in self._reader.shapes:
            tokenizer.drop_ends_from(self._reader.shapes[EMBEDDING][0])
        return tokenizer

    @cached_property
    @override
    def dtype(self) -> torch.dtype:
        keys = {
            key
            for weight in weights(self.architecture)
            if not weight.is_float32
            for suffix in weight.stored_suffixes
            for key in self._places[weight.stored + suffix].tensors
        }
        stored = self._reader.tensors
        return reduce(torch.promote_types, (stored[key].properties.dtype for key in sorted(keys)))

    @override
    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        self._tell_left_out()
        places = self._places | (self._mtp_places if shard.with_mtp else {})
        wanted = list(weights(self.architecture, shard))
        parameters = model_parameters(tensors, wanted)
        planner = DirectPlanner()
        stored = self._reader.tensors

        def plan(planner: DirectPlanner, weight: Weight, parameter: Tensor) -> None:
            clear_padding(weight, parameter)
            for suffix, offset, target in weight.stored_pieces(parameter):
                place = places[weight.stored + suffix]
                for key, start, part in place.pieces(offset, target):
                    planner.add(key, start, part, stored[key], str(self.folder))

        with byte_bar(total_bytes(parameters), progress) as bar:
            planner.bar = bar
            for weight in wanted:
                into = parameters[weight.name]
                if isinstance(into, QuantisedWeight):
                    with rounded_into(into) as values:
                        alone = DirectPlanner()
                        plan(alone, weight, values)
                        self._reader.read(alone)
                    bar.update(into.nbytes)
                else:
                    plan(planner, weight, into)
            self._reader.read(planner)

    @cached_property
    def _places(self) -> dict[str, StoredWeight]:
        """`Weight.stored` with one of its suffixes -> how it is stored here."""
        found, layers = self._reader.shapes, self.architecture.num_layers
        wanted = weights(self.architecture)
        places = stored_weights(wanted, len(self.architecture.pattern), found)
        expected = _tensors(places)
        check_shapes(str(self.folder), expected, found)
        extra = [
            key
            for key in found
            if key.startswith(MODEL_PARTS) and key not in expected and not key.endswith(EXTRA_STATE)
        ]
        if extra:
            raise CheckpointError(
                f"{self.folder}: tensor {min(extra)!r} (one of {len(extra)}) is not part of a "
                f"{layers}-layer {self.architecture.model_type} model with tie_word_embeddings = "
                f"{self.architecture.tie_word_embeddings}"
            )
        return places

    @cached_property
    def _mtp_places(self) -> dict[str, StoredWeight]:
        """Where the weights of multi-token prediction are stored, by parameter."""
        found = self._reader.shapes
        places = self._mtp_expected
        check_mtp_names(str(self.folder), _tensors(places), found)
        check_shapes(str(self.folder), _tensors(places), found)
        return places

    def _tell_left_out(self) -> None:
        """Name what is in the checkpoint, and no part of the model nor of its optimizer."""
        known = _tensors(self._places) | _tensors(self._mtp_expected)
        others = sorted(
            key
            for key in self._reader.shapes.keys() - known.keys()
            if not OPTIMIZER.match(key) and not key.endswith(EXTRA_STATE)
        )
        if others:
            logger.warning(
                "%s: tensor %r, one of %d that are no part of the model as its arguments describe "
                "it, is not loaded.", self.folder, others[0], len(others),
            )  # fmt: skip

    @property
    def _mtp_expected(self) -> dict[str, StoredWeight]:
        architecture = self.architecture
        wanted = mtp_weights(architecture)
        return stored_weights(wanted, len(architecture.pattern), self._reader.shapes)

    @property
    def has_mtp_weights(self) -> bool:
        """Whether any weight of multi-token prediction is stored."""
        return not self._reader.shapes.keys().isdisjoint(_tensors(self._mtp_expected))

    def _training_arguments(self, where: str) -> TrainingArguments:
        """Arguments of the run that wrote the checkpoint."""
        file = self.folder / COMMON_FILE
        if self._reader.has_object(COMMON_KEY):
            data = self._reader.read_object(COMMON_KEY)
        else:
            data = file.read_bytes() if file.is_file() else b""
        try:
            state = load_common_state(data) if data else {}
        except Exception as error:  # a pickle, and there damaged bytes can raise anything
            why = str(error) or type(error).__name__
            raise CheckpointError(f"{where}: cannot be read ({why}); {REMEDY}") from error
        # A sharded object holds one entry for each shard, here one.
        state = state[0] if isinstance(state, list) and state else state
        args = state.get("args") if isinstance(state, Mapping) else None
        values: Any = vars(args) if isinstance(args, Namespace) else args
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{self.folder}: says nothing about the model's architecture; {REMEDY}"
            )
        return TrainingArguments(values, where, REMEDY)


def _tensors(places: Mapping[str, StoredWeight]) -> dict[str, tuple[int, ...]]:
    return {key: shape for place in places.values() for key, shape in place.tensors.items()}


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
    write_object(folder / ARCHITECTURE, written.to_dict())
    if tokenizer is not None:
        tokenizer.save(folder)
