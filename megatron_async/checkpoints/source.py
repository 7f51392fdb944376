"""`ModelSource`: a model on disk, whatever its format, before any weight is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, override

import torch
from torch import Tensor, nn
from tqdm import tqdm

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.family_names import FamilyNames, names_of
from megatron_async.checkpoints.mapping import (
    Region,
    Shape,
    Shard,
    Weight,
    mtp_weights,
    weights,
)
from megatron_async.checkpoints.quantised import QuantisedFolder
from megatron_async.checkpoints.quantised_pieces import quantised_pieces
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.held_weight import Operand, quantised_weights
from megatron_async.ops.linear.cpu.group_form import StoredGroups
from megatron_async.ops.linear.quantised_layout import Layout, quantise
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

STACKED_EXPERTS = (".experts.gate_up_proj", ".experts.up_proj")
"""Ends of names of tensors that hold all experts."""
MODULE_NAMES = (*STACKED_EXPERTS, "model.norm_f.weight")
"""Ends of names that only transformers' modules have."""
READERS = 4
"""Threads that read weights for a GPU, each from the page cache to pinned memory."""
MTP_REMEDY = (
    "use speculative_method='ngram', which needs no weights, or none (to convert the model, use "
    "--no-mtp)"
)


ReadWeight = Callable[[str, Tensor], None]
"""Reads a weight, by its parameter's name, into a tensor on the host."""


class ModelSource(ABC):
    """A model that can be loaded.

    Opening one reads its configuration; tokenizer and weights are read when asked for.

    Attributes:
        name: what the user calls it: a path, "smollm2" or "dummy:SHAPE".
        format: "gguf", "huggingface", "torch_dist" or "dummy".
    """

    format: str

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def architecture(self) -> ModelArchitecture:
        """Shape and conventions of the model."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the source holds none (then only token ids can be served).

        Raises:
            TokenizerError: there is one, but it cannot be read.
        """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype that keeps every stored weight exactly, but for those that a model has in
        float32 whatever its dtype is."""

    @property
    @abstractmethod
    def has_mtp_weights(self) -> bool:
        """Whether any weight of the architecture's multi-token prediction is stored."""

    @property
    def quantised(self) -> QuantisedFolder | None:
        """What is quantised in the files; None: nothing, or the format has its own words."""
        return None

    @property
    def kept_bytes(self) -> int | None:
        """Bytes of the weights where blocks stay as they are (`kept_blocks.py`), all others in
        float32; None: no weight can be kept."""
        return None

    def stored_groups(self) -> Iterator[tuple[Weight, StoredGroups]]:
        """The whole weights that can be kept as the file's blocks."""
        return iter(())

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the files ask for keys and values in fp8."""
        return False

    def layouts(self, shard: Shard, rounds_rows: bool) -> Mapping[str, Layout]:
        """Layouts of the weights of a rank that can stay as the files have them, by parameter.

        Args:
            shard: of the rank.
            rounds_rows: products round rows to FP8 where they can.

        Raises:
            ConfigurationError: ranks cut a weight within groups of inputs.
        """
        return {}

    def load_weights(
        self, model: nn.Module, progress: bool = False, with_scales: bool = True
    ) -> None:
        """Fill a model, tensor by tensor, converting to its dtype and moving to its device.

        Weights of multi-token prediction are read where the model was built with it.

        Args:
            model: a `HybridModel` made by `build_model(self.architecture, ...)`.
            progress: show a progress bar on stderr.
            with_scales: read scales of keys and values too (`PagedSelfAttention.cache_scales`),
                which a cache in fp8 alone needs.

        Raises:
            CheckpointError: a tensor is missing, superfluous, unreadable or of a wrong shape; the
                message names it, with the shape that is expected and the one that was found.
        """
        self.load_into(named_tensors(model), Shard.of(model), progress)

    @abstractmethod
    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        """`load_weights` into tensors with a model's names, shapes and dtypes.

        Args:
            tensors: the parameters of a model by name (`named_tensors`), or others like them.
                Weights that are quantised in the model, and not in the files, are rounded.
            shard: the part of the whole model that they are.
            progress: show a progress bar on stderr.
        """


class NamedTensorSource(ModelSource):
    """A source that can give each tensor under its Hugging Face name."""

    @property
    @abstractmethod
    def tensor_shapes(self) -> Mapping[str, Shape]:
        """Shape of every stored tensor but those of multi-token prediction, by Hugging Face name,
        without reading any."""

    @property
    def mtp_shapes(self) -> Mapping[str, Shape]:
        """Shapes of the tensors of multi-token prediction, by name."""
        return {}

    @property
    def has_mtp_weights(self) -> bool:
        """Whether any weight of multi-token prediction is stored."""
        return any(not self.mtp_shapes.keys().isdisjoint(w.parts) for w in self._mtp_weights)

    @abstractmethod
    def read_tensor(self, name: str, region: Region, device: torch.device) -> Tensor:
        """A region of a tensor on a device, in its stored dtype or dequantised."""

    @override
    def load_weights(
        self, model: nn.Module, progress: bool = False, with_scales: bool = True
    ) -> None:
        super().load_weights(model, progress)
        if with_scales:
            self.load_scales(model)

    def load_scales(self, model: nn.Module) -> None:
        """Give a model's attention layers the scales of keys and values that are stored."""

    def fill(self, place: Tensor, name: str, region: Region) -> None:
        """Read a region of a tensor into its place in a parameter (see `Weight.places`), converting
        it."""
        place.copy_(self.read_tensor(name, region, place.device).view(place.shape))

    def is_quantised(self, name: str) -> bool:
        """Whether `fill_quantised` takes a tensor."""
        return False

    def fill_quantised(
        self, into: QuantisedWeight, places: Mapping[str, Tensor], name: str, region: Region,
        factor: float,
    ) -> None:  # fmt: skip
        """Read a region of a quantised tensor into its places in a quantised weight, times
        `factor`."""
        raise NotImplementedError

    def input_scale(self, parts: Sequence[str]) -> float:
        """The scale of the files by which inputs of a weight, of quantised tensors, are rounded.

        Raises:
            CheckpointError: it is no number to divide by, or a part has none.
        """
        raise NotImplementedError

    @property
    def names(self) -> FamilyNames | None:
        """Names of the tensors, but for those of multi-token prediction, where they are not Hugging
        Face's."""
        return None

    @property
    def has_stacked_experts(self) -> bool:
        """Whether names are those of transformers' modules, where a tensor holds all experts of a
        layer (see `weights`)."""
        return _are_modules(self.tensor_shapes)

    def check_stored(self, with_mtp: bool) -> None:
        """Check what else is stored, before weights are read, and tell what is left out.

        Raises:
            CheckpointError: something that cannot be left out.
        """

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if a file was written to while weights were read."""

    @cached_property
    def checked_weights(self) -> list[Weight]:
        """The model's weights, once names and shapes of all stored tensors are known to fit."""
        wanted = self.held_weights(Shard())
        expected = {name: shape for weight in wanted for name, shape in weight.parts.items()}
        check_shapes(self.name, expected, self.tensor_shapes)
        superfluous = set(self.tensor_shapes) - set(expected)
        if superfluous:
            raise CheckpointError(
                f"{self.name}: tensor {min(superfluous)!r} (one of {len(superfluous)}) is not part"
                f" of a {self.architecture.num_layers}-layer {self.architecture.model_type} model. "
                "The weights do not belong to the configuration, or the model has features that "
                "are not supported."
            )
        return wanted

    @property
    def _has_stacked_mtp(self) -> bool:
        return any(name.endswith(STACKED_EXPERTS) for name in self.mtp_shapes)

    @property
    def _mtp_weights(self) -> list[Weight]:
        return list(mtp_weights(self.architecture, self._has_stacked_mtp))

    @cached_property
    def checked_mtp_weights(self) -> list[Weight]:
        """The weights of multi-token prediction, once names and shapes of its stored tensors are
        known to fit."""
        wanted, found = self._mtp_weights, self.mtp_shapes
        expected = {name: shape for weight in wanted for name, shape in weight.parts.items()}
        check_mtp_names(self.name, expected, found)
        check_shapes(self.name, expected, found)
        superfluous = set(found) - set(expected)
        if superfluous:
            raise CheckpointError(
                f"{self.name}: tensor {min(superfluous)!r} (one of {len(superfluous)}) is not part "
                f"of multi-token prediction with mtp_pattern = {self.architecture.mtp_pattern!r} "
                f"and mtp_num_depths = {self.architecture.mtp_num_depths}: {MTP_REMEDY}."
            )
        return wanted

    @override
    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        self._check_weights(shard.with_mtp)
        wanted = self.held_weights(shard)
        parameters = model_parameters(tensors, wanted)
        is_cuda = any(parameter.is_cuda for parameter in parameters.values())
        with (
            byte_bar(total_bytes(parameters), progress) as bar,
            ThreadPoolExecutor(READERS) as pool,
        ):
            # What one piece raises ends the others: `map` cancels those that have not begun.
            work: Any = pool.map if is_cuda else map
            pieces, rounded = list[Callable[[], int]](), list[Weight]()
            for weight in wanted:
                into = parameters[weight.name]
                if not isinstance(into, QuantisedWeight):
                    pieces += self._fillings(weight, into)
                elif self.is_quantised(weight.held_parts[0]):
                    if into.input_scale is not None:
                        into.input_scale.fill_(self.input_scale(weight.held_parts))
                    for piece in quantised_pieces(weight, into):
                        pieces.append(partial(self._fill_quantised_piece, weight, into, *piece))
                else:
                    rounded.append(weight)
            for done in work(_call, pieces):
                bar.update(done)
            for weight in rounded:
                into = parameters[weight.name]
                assert isinstance(into, QuantisedWeight)
                with rounded_into(into) as values:
                    list(work(_call, self._fillings(weight, values)))
                bar.update(into.nbytes)
        self.check_unchanged()

    @contextmanager
    def reading(self, shard: Shard) -> Iterator[ReadWeight]:
        """Inside, a function that reads one weight of a rank into a tensor; raises as
        `load_weights`, before, in the function or in the end."""
        self._check_weights(shard.with_mtp)
        held = {weight.name: weight for weight in self.held_weights(shard)}

        def read(name: str, into: Tensor) -> None:
            for work in self._fillings(held[name], into):
                work()

        yield read
        self.check_unchanged()

    def _check_weights(self, with_mtp: bool) -> None:
        self.check_stored(with_mtp)
        _ = self.checked_weights
        if with_mtp:
            _ = self.checked_mtp_weights

    def held_weights(self, shard: Shard) -> list[Weight]:
        """The weights of a rank, with the names of this source."""
        stacked = self.has_stacked_experts, shard.with_mtp and self._has_stacked_mtp
        return list(weights(self.architecture, shard, *stacked, self.names))

    def _fillings(self, weight: Weight, parameter: Tensor) -> list[Callable[[], int]]:
        clear_padding(weight, parameter)
        return [partial(self._fill_piece, weight, *piece) for piece in weight.pieces(parameter)]

    def _fill_quantised_piece(
        self,
        weight: Weight,
        into: QuantisedWeight,
        name: str,
        region: Region,
        places: Mapping[str, Tensor],
    ) -> int:
        self.fill_quantised(into, places, name, region, weight.scale)
        return sum(place.nbytes for place in places.values())

    def _fill_piece(self, weight: Weight, name: str, region: Region, place: Tensor) -> int:
        """Read a piece of a weight into its place, and count its bytes. It goes to the device as it
        is stored; there it is converted. On the host nothing is joined or converted."""
        if place.is_meta:  # it is kept in another form
            return 0
        if place.numel() and weight.scale == 1 and not weight.offset:
            self.fill(place, name, region)
        elif place.numel():
            values = self.read_tensor(name, region, place.device).float()
            values = values * weight.scale + weight.offset
            place.copy_(values.view(place.shape))
        return place.nbytes


def _call(work: Callable[[], int]) -> int:
    return work()


@contextmanager
def rounded_into(into: Operand) -> Iterator[Tensor]:
    """Where the numbers of a weight are to be written: itself, or of a quantised weight a copy in
    its dtype, which is rounded and let go in the end."""
    if isinstance(into, QuantisedWeight):
        values = torch.empty(into.shape, dtype=into.dtype, device=into.device)
        yield values
        quantise(values, into)
    else:
        yield into


def _are_modules(names: Iterable[str]) -> bool:
    return any(name.endswith(MODULE_NAMES) for name in names)


def embedding_name(model_type: str, names: Iterable[str]) -> str:
    """Hugging Face name of the embedding, by the names of the stored tensors."""
    return names_of(model_type, _are_modules(names), gated=False).embedding


def clear_padding(weight: Weight, parameter: Tensor) -> None:
    """Zero a parameter that has rows of padding, before the rest is read."""
    filled = sum(place.numel() for _name, _region, place in weight.pieces(parameter))
    if filled < parameter.numel():
        parameter.zero_()


def check_mtp_names(source: str, expected: Collection[str], found: Collection[str]) -> None:
    """Raise `CheckpointError` if a weight of multi-token prediction is not stored."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{source}: tensor {missing[0]!r}, one of {len(missing)} of {len(expected)} of "
            f"multi-token prediction, is missing: {MTP_REMEDY}."
        )


def check_shapes(source: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Raise `CheckpointError` for the first tensor of `expected` that is missing or misshapen."""
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(
                f"{source}: tensor {name!r} of shape {list(shape)} is missing. The file is "
                "incomplete or belongs to another configuration."
            )
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{source}: tensor {name!r} has the wrong shape: expected {list(shape)}, found "
                f"{list(found[name])}. The weights do not belong to the configuration."
            )


def named_tensors(model: nn.Module) -> dict[str, Operand]:
    """The model's weights by the names of its parameters, without gradients."""
    plain = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {**plain, **dict(quantised_weights(model))}


def model_parameters[T: Operand](
    tensors: Mapping[str, T], wanted: Sequence[Weight]
) -> dict[str, T]:
    """A model's parameters (`named_tensors`) by `Weight.name`, once they are known to be just the
    wanted weights.

    A model of TransformerEngine layers has some of them under another name (`Weight.fused_name`).
    """
    unfilled = dict(tensors)
    shapes = {weight.name: weight.shape for weight in wanted}
    parameters = {}
    for weight in wanted:
        name = weight.name if weight.name in unfilled else weight.fused_name
        if name in unfilled:
            parameters[weight.name] = unfilled.pop(name)
    check_shapes("the model", shapes, {name: tuple(p.shape) for name, p in parameters.items()})
    if unfilled:
        raise CheckpointError(
            f"the model: parameter {min(unfilled)!r} has no counterpart in the checkpoint's "
            "architecture. Build the model with build_model(source.architecture, ...)."
        )
    return parameters


def total_bytes(parameters: Mapping[str, Operand]) -> int:
    """Bytes of all parameters together."""
    return sum(
        parameter.nbytes for parameter in parameters.values() if parameter.device.type != "meta"
    )


def byte_bar(total: int, show: bool, label: str = "loading weights") -> Any:
    """A progress bar over `total` bytes of weights, with bytes a second, if `show` and stderr is a
    terminal.

    It is a context manager; call `update` on it with the bytes that are done.
    """
    disable = None if show else True  # None: tqdm itself asks whether there is a terminal
    return tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=disable, leave=False)


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of that name.

    Raises:
        CheckpointError: not one that weights may have.
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise CheckpointError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    return found


def cache_dtype(asked: str, source: ModelSource) -> str:
    """`kv_cache_dtype` of an engine, "fp8" or "model", where "auto" follows the model's files."""
    if asked != "auto":
        return asked
    return "fp8" if source.has_fp8_cache else "model"
