"""A checksum of a model's weights by their bits, which does not depend on how ranks share them.

Every element is hashed with its place in the whole weight, and a weight's sum is over its elements,
modulo 2^64. So ranks add up: a part that several of them hold is counted on the first of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.checkpoints.mapping import Shard, Weight, weights
from megatron_async.checkpoints.quantised_pieces import on_grid
from megatron_async.checkpoints.source import model_parameters, named_tensors
from megatron_async.errors import UpdateError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.held_weight import Operand
from megatron_async.models.kept_weights import check_has_numbers
from megatron_async.models.pipeline import EMBEDDING, OUTPUT
from megatron_async.ops.linear.quantised_weight import QuantisedWeight

ELEMENTS = 2**22
"""Elements that are hashed at once: 32 MiB a number."""
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_checksum(model: nn.Module) -> dict[str, int]:
    """Sums of what this rank holds, by the name of each weight in a Megatron checkpoint; for a
    model at rest, or within launched work.

    Raises:
        UpdateError: the model was built by others, or its weights are a GGUF file's blocks.
    """
    architecture: Any = getattr(model, "architecture", None)
    if architecture is None:
        raise UpdateError("only models of megatron_async's loader have a checksum by name.")
    check_has_numbers(model)
    return parameters_checksum(named_tensors(model), Shard.of(model), architecture)


def parameters_checksum(
    parameters: Mapping[str, Operand], shard: Shard, architecture: ModelArchitecture
) -> dict[str, int]:
    """`weights_checksum` of the parameters of a rank that holds `shard`."""
    held = list(weights(architecture, shard))
    named = model_parameters(parameters, held)
    sums = {}
    for weight in held:
        if weight.name == OUTPUT and weight.stored == EMBEDDING:
            continue  # a last stage's copy
        for name, tensor in _tensors(weight, named[weight.name]):
            sums[name] = sum(_sum(weight, *piece) for piece in tensor) % 2**64
    return sums


Pieces = Iterator[tuple[list[int], Tensor]]


def _tensors(weight: Weight, held: Operand) -> Iterator[tuple[str, Pieces]]:
    """A weight's tensors, by the names of their sums: of a quantised one the codes, then others."""
    if not isinstance(held, QuantisedWeight):
        yield weight.stored, _own_pieces(weight, held)
        return
    grid = on_grid(weight, held.form.rows)
    assert grid is not None, "it was laid out so"
    columns = {"codes": 8 // held.form.bits, "outer": 0}
    for name, tensor in held.tensors():
        if name == "input_scale":  # the same on all ranks
            rows = [] if weight.shard.tensor_rank else [([0, 0], tensor.view(1, 1))]
            yield f"{weight.stored} {name}", iter(rows)
            continue
        owner = grid if name in ("scales", "zeros") else weight
        pieces = _own_pieces(owner, tensor[..., None] if name == "outer" else tensor)
        yield (
            weight.stored if name == "codes" else f"{weight.stored} {name}",
            _in_columns(pieces, columns.get(name, held.form.inputs)),
        )


def _in_columns(pieces: Pieces, each: int) -> Pieces:
    """Pieces of a tensor of which a column covers `each` of the weight; 0: all."""
    for origin, piece in pieces:
        yield [*origin[:-1], origin[-1] // each if each else 0], piece


def combined(ranks: Iterable[Mapping[str, int]]) -> str:
    """One text for the sums of all ranks: 32 hexadecimal digits."""
    total = Counter[str]()
    for sums in ranks:
        total.update(sums)
    lines = [f"{name} {number % 2**64:016x}" for name, number in sorted(total.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _own_pieces(weight: Weight, parameter: Tensor) -> Pieces:
    """`Weight.whole_pieces`, those that another rank counts left out."""
    shard = weight.shard
    if shard.expert_rank and not weight.experts:
        return
    for number, piece in enumerate(weight.whole_pieces(parameter)):
        is_shared = weight.partition_dim is not None
        if weight.strips:
            is_shared = weight.strips[number].is_shared
        if is_shared or not shard.tensor_rank:
            yield piece


def _sum(weight: Weight, origin: list[int], piece: Tensor) -> int:
    if not piece.numel():
        return 0
    rows = max(1, ELEMENTS * len(piece) // piece.numel())
    total = 0
    for first in range(0, len(piece), rows):
        part = piece[first : first + rows].contiguous()
        hashed = part.view(_BITS[part.element_size()]).long() * _ODD[0]
        hashed += _places(weight.whole_shape, [origin[0] + first, *origin[1:]], part)
        hashed ^= hashed >> 31
        hashed *= _ODD[1]
        hashed ^= hashed >> 29
        total += int((hashed * _ODD[2]).sum())
    return total


def _places(shape: tuple[int, ...], origin: list[int], part: Tensor) -> Tensor:
    """Place of each element in the whole weight."""
    places, stride = torch.zeros((), dtype=torch.int64, device=part.device), 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(part.size(dim), device=part.device) + origin[dim]
        places = places + (along * stride).view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return places
