"""One parameter of a model: what it is called elsewhere, of what it is made, what a rank holds.

A rank of many holds a `Shard` of the model. What it holds of a weight follows from what is declared
of it: the axis along which ranks share it, and, where one stored tensor is made of several that are
split each by itself, its strips. Loaders ask `Weight.pieces` and `Weight.stored_pieces`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_async.models.pipeline import Stage, stage_of

Shape = tuple[int, ...]
Region = tuple[slice, ...]
"""A slice of each axis of a stored tensor, with start and stop."""
EXTRA_STATE = "._extra_state"
"""End of the keys of TransformerEngine's scaling factors, which only fp8 computation needs."""
LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Shard:
    """Which part of a model a rank holds; by default, all of it."""

    tensor_rank: int = 0
    """Number of the rank in its tensor-parallel group."""
    tensor_size: int = 1
    """Ranks of that group."""
    expert_rank: int = 0
    """Number of the rank in its expert-parallel group."""
    expert_size: int = 1
    """Ranks of that group."""
    stage: Stage | None = None
    """The pipeline stage; None: the only one."""
    with_mtp: bool = False
    """Whether layers of multi-token prediction are part of it."""

    @classmethod
    def of(cls, model: nn.Module) -> Shard:
        """The part that a Megatron model was built for."""
        groups = getattr(model, "pg_collection", None)
        stage = stage_of(getattr(model, "config", None))
        stage_or_none = stage if stage.count > 1 else None
        with_mtp = getattr(model, "mtp", None) is not None
        if groups is None:
            return cls(stage=stage_or_none, with_mtp=with_mtp)
        tensor, expert = groups.tp, groups.ep
        return cls(
            tensor.rank(), tensor.size(), expert.rank(), expert.size(), stage_or_none, with_mtp
        )

    def local_name(self, name: str) -> str | None:
        """A parameter's name in this rank's model, from that in the whole one; None: not held."""
        return name if self.stage is None else self.stage.local_name(name)

    def experts_of(self, count: int) -> range:
        """The experts of this rank, of `count` in all (a multiple of the ranks)."""
        share = count // self.expert_size
        return range(self.expert_rank * share, (self.expert_rank + 1) * share)

    def range_of(self, size: int) -> range:
        """Indices of this rank in an axis of `size`: an equal share; where the ranks do not divide
        the axis, the last ranks have less."""
        if self.tensor_size == 1:
            return range(size)
        share = -(-size // self.tensor_size)
        first = min(self.tensor_rank * share, size)
        return range(first, min(first + share, size))


def gpt_name(name: str) -> str:
    """Name of a weight in a `GPTModel`, from that in a `HybridModel`."""
    found = LAYER_NUMBER.match(name)
    if found is None:
        name = name.replace("final_norm", "final_layernorm")
        return re.sub(r"mtp_model_layer\.layers\.\d+\.", "transformer_layer.", name)
    return LAYER_NUMBER.sub(f"decoder.layers.{int(found[1]) // 2}.", name)


@dataclass(frozen=True)
class Strip:
    """Rows of a stored tensor that ranks split by themselves: of `in_proj` x, z, B, C and dt."""

    name: str
    """Megatron's."""
    rows: int
    """On all ranks together."""
    is_shared: bool = True
    """Each rank has a share of it; else all of it."""


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a Hugging Face tensor."""

    part: int
    """Which of the weight's parts."""
    first: int
    count: int


@dataclass(frozen=True)
class Weight:
    """One parameter of the model and its names elsewhere.

    The parameter consists of `groups` equal groups of rows; each group holds that group's share of
    every part, in order. So `linear_qkv` is, per KV group, [its q heads, k, v], and `linear_fc1`,
    with one group, is [gate; up]. The parameter of several experts is theirs one after the other. A
    parameter with strips has one part, which holds the strips one after the other, or an `order`.
    """

    name: str
    """Parameter of this rank's `HybridModel`."""
    parts: dict[str, Shape]
    """Hugging Face tensors that it is made of, with their shapes."""
    groups: int
    stored: str
    """Key in a Megatron checkpoint of the `HybridModel`, which is the whole model's."""
    partition_dim: int | None = None
    """Axis along which tensor-parallel ranks share the weight, by Megatron's name: 0, rows (of each
    part, or whole groups), 1, columns, or None: every rank holds all of it. Where an axis does not
    divide (the vocabulary), the parameter has rows of padding at its end."""
    shard: Shard = Shard()
    """The part of this rank."""

    experts: int = 0
    """Experts of a weight `[experts, rows, columns]`, spread over expert-parallel ranks; its
    `partition_dim` counts the axes of one expert. 0: there is no such axis."""
    strips: tuple[Strip, ...] = ()
    """Strips of the rows of its only part; empty: it is split as a whole."""
    is_stored_in_strips: bool = False
    """A Megatron checkpoint holds each strip under a key of its own."""
    is_float32: bool = False
    """The parameter is float32 whatever the model's dtype is."""
    scale: float = 1.0
    """The parameter is what Hugging Face stores times this (a multiplier of Granite's); Megatron's
    checkpoints hold the product."""
    offset: float = 0.0
    """And then plus this: -1 where Hugging Face stores a norm's factor and Megatron factor - 1."""
    has_swapped_halves: bool = False
    """Hugging Face has the second half of the columns first. Not for strips, nor for experts."""
    alternates: bool = False
    """Rows of its strips, all of one size, stand in turns in Hugging Face's tensor (gpt-oss)."""
    order: tuple[Rows, ...] = ()
    """Where the rows of the whole weight, or of each of its experts, are found in the parts, from
    the first to the last, for parts that hold them in another order; such a weight has strips.
    Empty: as said above."""

    @property
    def is_stacked(self) -> bool:
        """Whether one Hugging Face tensor holds all experts."""
        dims = 2 if self.name.endswith("bias") else 3
        return self.experts > 0 and len(next(iter(self.parts.values()))) == dims

    @property
    def is_of_whole_rows(self) -> bool:
        """Whether its rows, of all experts one after the other, are those of its parts as they are
        stored, times `scale`."""
        dims = 3 if self.experts else 2
        return not (self.offset or self.has_swapped_halves) and len(self.whole_shape) == dims

    @property
    def held_parts(self) -> list[str]:
        """Parts of which this rank holds something: those of its own experts."""
        parts = list(self.parts)
        if not self.experts or self.is_stacked:
            return parts
        each = len(parts) // self.experts
        held = self.shard.experts_of(self.experts)
        return parts[held.start * each : held.stop * each]

    @property
    def fused_name(self) -> str | None:
        """The parameter of a model of TransformerEngine layers, which hold a norm's weight in the
        linear layer after it, as Megatron's checkpoints do."""
        return self.shard.local_name(self.stored)

    @property
    def whole_shape(self) -> Shape:
        """Shape of the whole weight, on all ranks together, without padding."""
        shapes = list(self.parts.values())
        if self.is_stacked:
            return (self.experts, sum(shape[1] for shape in shapes), *shapes[0][2:])
        rows = sum(shape[0] for shape in shapes)
        lead = (self.experts, rows // self.experts) if self.experts else (rows,)
        return (*lead, *shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """Shape of the parameter on this rank."""
        shape = list(self.whole_shape)
        if self.experts:
            shape[0] = len(self.shard.experts_of(self.experts))
        if self.strips:
            shape[self._row_axis] = sum(len(self._strip_range(strip)) for strip in self.strips)
        elif self.partition_dim is not None:
            dim = self.partition_dim + (self.experts > 0)
            shape[dim] = -(-shape[dim] // self.shard.tensor_size)
        return tuple(shape)

    @property
    def _row_axis(self) -> int:
        return 1 if self.experts else 0

    def _strip_range(self, strip: Strip) -> range:
        return self.shard.range_of(strip.rows) if strip.is_shared else range(strip.rows)

    def held(self, part: str) -> Region:
        """Which region of a part, as it is stored, this rank holds: a slice of each axis. Not for
        strips, of which a rank holds several regions."""
        ranges = [range(size) for size in self.parts[part]]
        if self.is_stacked:
            ranges[0] = self.shard.experts_of(self.experts)
        if self.partition_dim is not None:
            dim = self.partition_dim + self.is_stacked
            ranges[dim] = self.shard.range_of(len(ranges[dim]))
        return tuple(slice(held.start, held.stop) for held in ranges)

    @property
    def gpt_layer(self) -> int | None:
        """Layer of this weight in a Megatron checkpoint of the deprecated `GPTModel`, where a layer
        is two of the `HybridModel`: a mixer, and an MLP or experts. None outside the layers."""
        found = LAYER_NUMBER.match(self.stored)
        return None if found is None else int(found[1]) // 2

    @property
    def stored_gpt(self) -> str:
        """Key in a Megatron checkpoint of the deprecated `GPTModel`, where a depth of multi-token
        prediction is one transformer layer."""
        return gpt_name(self.stored)

    @property
    def stored_stacked(self) -> str:
        """Key in a `GPTModel` checkpoint whose layers are stacked: `[layers, *shape]` there."""
        return re.sub(r"layers\.\d+\.", "layers.", self.stored_gpt)

    @property
    def stored_suffixes(self) -> dict[str, Shape]:
        """What is added to the weight's key in a Megatron checkpoint -> whole shape under it."""
        if not self.is_stored_in_strips:
            return {"": self.whole_shape}
        rest = self.whole_shape[1:]
        return {f".{strip.name}": (strip.rows, *rest) for strip in self.strips}

    def places(self, parameter: Tensor) -> dict[str, Tensor]:
        """Where what is held of the parts lies in the parameter: Hugging Face name -> view
        `[groups, rows of the part / groups, ...]`. Rows of padding are in no place. Not for strips
        of which ranks have shares."""
        return {name: place for name, _, place in self._held_places(parameter)}

    def _held_places(self, parameter: Tensor) -> Iterator[tuple[str, Region, Tensor]]:
        """`held` and `places` of each part."""
        groups = self.groups
        if self.partition_dim == 0 and groups > 1:
            groups //= self.shard.tensor_size
        has_experts = self.experts > 0 and not self.is_stacked
        grouped = parameter.view(groups, -1, *parameter.shape[2 if has_experts else 1 :])
        held = {part: self.held(part) for part in self.held_parts}
        rows = [(part[0].stop - part[0].start) // groups for part in held.values()]
        padding = grouped.size(1) - sum(rows)
        places = grouped.split([*rows, padding], dim=1)
        return zip(held, held.values(), places, strict=False)

    def pieces(self, parameter: Tensor) -> Iterator[tuple[str, Region, Tensor]]:
        """What this rank reads of Hugging Face's tensors: name, region, and the view of the
        parameter that it fills, of as many elements. Some may be empty."""
        if self.order:
            yield from self._ordered_pieces(parameter)
            return
        if self.alternates:
            yield self._piece_in_turns(parameter)
            return
        if self.strips:
            (name,) = self.parts
            for _strip, region, place in self._strip_pieces(parameter):
                yield name, region, place
            return
        for name, held, place in self._held_places(parameter):
            if not self.has_swapped_halves:
                yield name, held, place
                continue
            (rows, _columns), half = held, place.size(-1) // 2
            yield name, (rows, slice(half, 2 * half)), place[..., :half]
            yield name, (rows, slice(0, half)), place[..., half:]

    def _piece_in_turns(self, parameter: Tensor) -> tuple[str, Region, Tensor]:
        """The only piece of strips whose rows stand in turns: its place is `[1, experts, rows of a
        strip, strips, ...]`."""
        (name,), axis, count = self.parts, self._row_axis, len(self.strips)
        ranges = [range(size) for size in self.whole_shape]
        if self.experts:
            ranges[0] = self.shard.experts_of(self.experts)
        held = self._strip_range(self.strips[0])
        ranges[axis] = range(count * held.start, count * held.stop)
        region = tuple(slice(part.start, part.stop) for part in ranges)
        return name, region, parameter.unflatten(axis, (count, -1)).transpose(axis, axis + 1)[None]

    def _ordered_pieces(self, parameter: Tensor) -> Iterator[tuple[str, Region, Tensor]]:
        """`pieces` by `order`: what each run of rows has in common with each held strip."""
        names, axis = list(self.parts), self._row_axis
        for _strip, held, place in self._strip_pieces(parameter):
            start, stop = held[axis].start, held[axis].stop
            at = 0
            for rows in self.order:
                first, last = max(start, at), min(stop, at + rows.count)
                if first < last:
                    source = slice(rows.first + first - at, rows.first + last - at)
                    region = (*held[:axis], source, *held[axis + 1 :])
                    here = place.narrow(axis, first - start, last - first)
                    yield names[rows.part], region, here
                at += rows.count

    def _strip_pieces(self, parameter: Tensor) -> Iterator[tuple[Strip, Region, Tensor]]:
        """For each strip what this rank holds: a region of the whole weight, and the view of the
        parameter."""
        axis = self._row_axis
        ranges = [range(size) for size in self.whole_shape]
        if self.experts:
            ranges[0] = self.shard.experts_of(self.experts)
        start = first = 0
        for strip in self.strips:
            held = self._strip_range(strip)
            ranges[axis] = range(start + held.start, start + held.stop)
            region = tuple(slice(part.start, part.stop) for part in ranges)
            yield strip, region, parameter.narrow(axis, first, len(held))
            start += strip.rows
            first += len(held)

    def whole_pieces(self, parameter: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Pieces of the whole weight: where each begins in the weight, and the view of the
        parameter that the piece fills."""
        if self.strips:
            for _strip, region, place in self._strip_pieces(parameter):
                yield [part.start for part in region], place
            return
        if self.experts:
            yield from self._expert_pieces(parameter)
            return
        origin = [0] * parameter.dim()
        if self.partition_dim != 0:
            if self.partition_dim is not None:
                dim = self.partition_dim
                origin[dim] = self.shard.range_of(self.whole_shape[dim]).start
            yield origin, parameter
        elif self.groups > 1:
            origin[0] = self.shard.tensor_rank * len(parameter)
            yield origin, parameter
        else:
            first = 0
            for part, place in self.places(parameter).items():
                origin[0] = first + self.held(part)[0].start
                first += self.parts[part][0]
                yield list(origin), place[0]

    def stored_pieces(self, parameter: Tensor) -> Iterator[tuple[str, list[int], Tensor]]:
        """Pieces of the weight in a Megatron checkpoint: one of `stored_suffixes`, where the piece
        begins in the tensor under that name, and the view of the parameter that the piece fills."""
        if not self.is_stored_in_strips:
            for origin, place in self.whole_pieces(parameter):
                yield "", origin, place
            return
        for strip, _region, place in self._strip_pieces(parameter):
            origin = [0] * parameter.dim()
            origin[0] = self._strip_range(strip).start
            yield f".{strip.name}", origin, place

    def _expert_pieces(self, parameter: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """`[experts, rows, columns]`, where each expert's rows are those of its parts in turn."""
        first = self.shard.experts_of(self.experts).start
        _experts, rows, *rest = self.whole_shape
        if self.partition_dim != 0:
            yield [first, 0, *(self.shard.range_of(size).start for size in rest)], parameter
            return
        parts = len(self.parts) // self.experts
        for part, place in enumerate(parameter.chunk(parts, dim=1)):
            start = part * rows // parts + self.shard.range_of(rows // parts).start
            yield [first, start, *(0 for _ in rest)], place

    def split(self, parameter: Tensor) -> dict[str, Tensor]:
        """The parts of a whole weight, as Hugging Face stores them: name -> contiguous tensor."""
        if self.offset or self.scale != 1:
            stored = (parameter.float() - self.offset) / self.scale
            parameter = stored.to(parameter.dtype)
        if self.has_swapped_halves:
            parameter = parameter.roll(parameter.size(1) // 2, dims=1)
        if self.order:
            parts = {name: parameter.new_empty(shape) for name, shape in self.parts.items()}
            for name, region, place in self._ordered_pieces(parameter):
                parts[name][region] = place
            return parts
        if self.alternates:
            name, _, place = self._piece_in_turns(parameter)
            return {name: place.reshape(self.parts[name])}
        places = self.places(parameter)
        return {name: place.flatten(0, 1).contiguous() for name, place in places.items()}
