"""`WeightRound`: new weights on their way to one rank, from the first bucket to the step that has
them.

Of weights that are kept in FP8, tensors wait in the model's dtype, and the commit rounds them.

| staging | where tensors wait | second memory |
| --- | --- | --- |
| "device", "host" | in spare tensors of the parameters' shapes (host: pinned) | as large |
| "direct" | where they are, whole and unchanged from `finish` until the step | none |
| "none" | nowhere: they go into the parameters at once, so no step may run meanwhile | none |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.mapping import Shape, Shard, Weight, weights
from megatron_async.checkpoints.registry import open_model
from megatron_async.checkpoints.source import clear_padding, model_parameters, named_tensors
from megatron_async.devices import Device, Event, makes_ordinary_tensors
from megatron_async.errors import UpdateError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.held_weight import Operand
from megatron_async.models.kept_weights import check_has_numbers
from megatron_async.models.pipeline import EMBEDDING
from megatron_async.ops.linear.quantised_layout import can_quantise
from megatron_async.ops.linear.quantised_weight import QuantisedWeight, widened
from megatron_async.updates.incoming import (
    HUGGINGFACE,
    NAMES,
    WHOLE,
    Known,
    Names,
    NameTable,
    Parts,
    Pieces,
)
from megatron_async.updates.round_plan import STAGINGS, make_plan
from megatron_async.updates.writes import Copies, Write, check_twins, checked, giving_way, let_go

SELECTORS = ("all", "target", "draft")
_OTHER_FACTS = ("model_type", "max_position_embeddings", "eos_token_ids", "bos_token_id")
"""Fields of an architecture on which no weight and no logit depends."""


@dataclass
class _Held:
    """A weight of this rank in a round, and what of it was written.

    Each kind of names divides a weight in one way, or not at all. So parts that came once, and no
    more elements than there are, cover no place twice.
    """

    weight: Weight
    parameter: Operand
    elements: int
    """Without rows of padding."""
    written: int = 0
    """Elements that came."""
    parts: set[int | str] = field(default_factory=lambda: {WHOLE})
    """Parts that came (`Parts.part`), and the whole, of which `written` tells."""

    def mark(self, part: int | str, elements: int) -> bool:
        """Note what is written; returns whether it was for the first time."""
        if not elements:
            return True
        is_new = part == WHOLE or part not in self.parts
        self.parts.add(part)
        self.written += min(elements, self.elements)
        return is_new and self.written <= self.elements


class WeightRound:
    """One rank's part of a weight update; implements `Stage`.

    `load`, `load_folder` and `finish` may run on any thread, one at a time, while steps run (but
    with staging "none").

    Args:
        parameters: of this rank, by name (`named_tensors`).
        shard: which part of the whole model they are.
        architecture: of the whole model.
        device: where steps run.
        refresh: makes the derived copies again (`DerivedCopies.refresh`).
        staging: see above; "auto": the device, or the host where the device has no room.
        names: of the tensors that will come (`updates/incoming.py`); "auto": by the tensors.
        partial: weights that do not come keep their numbers.
        selector: "target", the model; "draft", its layers of multi-token prediction; "all", what of
            both the model was built with.
        checks_finite: refuse NaN and infinities.

    Attributes:
        plan: what the round takes.
        takes_shards: a tensor may be this rank's shard; False: all ranks get the same tensors.
        is_torn: the model has weights of two versions, by staging "none"; a whole round mends it.

    Raises:
        UpdateError: an unknown option; a model that others have built; no memory for the staging,
            with the bytes.
    """

    @classmethod
    def of(cls, wrapper: Any, **options: Any) -> WeightRound:
        """A round for the model of an engine's wrapper; options as above."""
        model, context = wrapper.model, wrapper.inference_context
        architecture = getattr(model, "architecture", None)
        if architecture is None:
            raise UpdateError(
                "this model was built outside of megatron_async's loader, which alone knows its "
                "weights by name: write into its parameters within engine.weights_open()."
            )
        check_has_numbers(model)
        parameters, shard = named_tensors(model), Shard.of(model)
        refresh = wrapper.derived.refresh
        return cls(parameters, shard, architecture, context.device, refresh, **options)

    @makes_ordinary_tensors
    def __init__(
        self,
        parameters: Mapping[str, Operand],
        shard: Shard,
        architecture: ModelArchitecture,
        device: Device,
        refresh: Callable[[], bool],
        *,
        staging: str = "auto",
        names: str = "auto",
        partial: bool = False,
        selector: str = "all",
        checks_finite: bool = False,
    ) -> None:
        for option, value, known in (
            ("staging", staging, STAGINGS),
            ("names", names, NAMES),
            ("selector", selector, SELECTORS),
            ("partial", partial, (True, False)),
            ("checks_finite", checks_finite, (True, False)),
        ):
            if value not in known:
                each = ", ".join(map(str, known))
                raise UpdateError(f"{option}={value!r} is unknown: use one of {each}.")
        self._architecture, self._device, self._refresh = architecture, device, refresh
        self._partial, self._selector, self._checks_finite = partial, selector, checks_finite
        self._given = names
        self._shard, self._names = shard, Names(names, architecture, shard)
        if selector == "draft" and not shard.with_mtp:
            raise UpdateError(
                "selector='draft', but the engine has no layers of multi-token prediction: start "
                "it with speculative_method='mtp', or leave the selector out."
            )
        everything = list(giving_way(weights(architecture, shard)))
        named = model_parameters(parameters, everything)
        self._held = {
            weight.name: _Held(weight, named[weight.name], _elements(weight))
            for weight in everything
            if self._is_selected(weight.stored)
        }
        for held in self._held.values():
            if isinstance(held.parameter, QuantisedWeight):
                _check_rounds(held.weight.stored, held.parameter, staging)
        weights_held = [held.parameter for held in self._held.values()]
        sizes = [math.prod(each.shape) * each.dtype.itemsize for each in weights_held]
        self._spare: dict[str, Tensor] = {}
        self._pieces: dict[int, Pieces] = {}
        self._later: list[Write] = []
        self._embedding: dict[str, list[Write]] = {}
        self._twins: list[tuple[Write, Write]] = []
        self._twin_names = set[tuple[str, str]]()
        self._doubled: list[str] = []
        self._ready: list[Event] = []
        self._copies: Copies | None = None
        self._copied: Event | None = None
        self._state = "open"
        self.takes_shards, self.is_torn = True, False
        self.plan = make_plan(device, staging, sizes, partial)
        if partial or staging == "none":
            device.caller_waits()  # parameters are read or written: an update before is to be done
        if self.plan.spare_bytes and not partial:
            for name in self._held:
                self._target(name)

    @makes_ordinary_tensors
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors: whole ones or this rank's shard, in any order and any number of calls.

        A tensor that is staged may be changed when this returns, in the order of the caller's
        stream.

        Raises:
            UpdateError: a name that the model has not, a wrong shape or dtype, a form that is not
                served, numbers that are not finite. The round can only be dropped then.
        """
        self._begin()
        if isinstance(tensors, str | Path):
            raise UpdateError(
                f"{str(tensors)!r:.200} is no tensors: a folder is read by load_folder of a round "
                "(`begin_weight_update`), whose finish() ends it."
            )
        for pair in giving_way(tensors):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UpdateError(
                    f"{pair!r:.80} is no pair of a name and a tensor: give pairs, as items() does."
                )
            self._take(*pair)
        self._end()

    def check(self, tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Check names and shapes of tensors that are to come, before there is memory for them.

        Raises:
            UpdateError: as `load`.
        """
        for sent, shape in tensors:
            if (found := self._names.find(sent)) is not None:
                self._fit(sent, *found, tuple(shape))
            elif math.prod(shape) > self._names.table().most_elements:
                raise UpdateError(
                    f"tensor {sent!r:.200} is not part of this model, and with shape "
                    f"{list(shape)!r:.200} larger than any that is: leave it out."
                )

    @makes_ordinary_tensors
    def load_folder(self, folder: str | Path) -> None:
        """Take all weights from a Hugging Face or `torch_dist` folder; of it this rank's part is
        read.

        Raises:
            UpdateError: no such folder, of another model, or not readable; or tensors must be whole
                before (staging "direct").
        """
        self._begin()
        path = Path(folder)
        if not path.is_dir():
            raise UpdateError(f"folder {str(folder)!r}: no such folder.")
        if self.plan.staging == "direct" or self._selector == "draft" or self._given != "auto":
            raise UpdateError(
                f"folder {str(folder)!r}: cannot be read with staging={self.plan.staging!r}, "
                f"selector={self._selector!r} and names={self._given!r}: use staging 'device' or "
                "'host', and neither selector nor names, as a folder's format tells its names."
            )
        try:
            source = open_model(path)
            _check_same(self._architecture, source.architecture, str(folder))
            if self.plan.staging == "none":
                self.is_torn = True
            shard = replace(self._shard, with_mtp=any(map(_is_draft, self._held)))
            source.load_into({name: self._target(name) for name in self._held}, shard)
        except CheckpointError as error:
            raise UpdateError(str(error)) from error
        for held in self._held.values():
            if not held.mark(WHOLE, held.elements):
                self._doubled.append(held.weight.stored)
            written = self._target(held.weight.name)
            self._check_finite(held.weight.stored, written, written.dtype)
        self._end()

    def finish(self) -> None:
        """Say that all has come.

        Raises:
            UpdateError: names what was written twice, or, unless `partial`, not at all.
        """
        self._begin()
        if self._doubled:
            raise UpdateError(
                f"tensor {self._doubled[0]!r} (one of {len(self._doubled)}) was written twice in "
                "this round: send each weight once."
            )
        missing = [] if self._partial else self._missing()
        if missing:
            hint = "partial=True"
            if all(map(_is_draft, missing)):
                hint = "selector='target'"
            raise UpdateError(
                f"tensor {missing[0]!r} (one of {len(missing)}) was not sent in this round: send "
                f"all weights, or begin the round with {hint}."
            )
        for write in self._later:
            self._check_finite(write.sent, write.values, write.place.dtype)
        for pair in self._twins:
            check_twins(*pair)
        pairs, rounded = list[tuple[Tensor, Tensor]](), list[tuple[QuantisedWeight, Tensor]]()
        for name, spare in self._spare.items():
            into = self._held[name].parameter
            if isinstance(into, QuantisedWeight):
                rounded.append((into, spare))
            else:
                pairs.append((into, spare))
        pairs += [write.pair for write in self._later if not write.is_scaled]
        scaled = [write for write in self._later if write.is_scaled]
        self._copies = Copies(self._device, pairs, scaled, rounded)
        self._end()
        self._state = "finished"

    def commit(self) -> bool:
        """Enqueue the copies and then the derived copies; see `Stage`."""
        assert self._copies is not None, "finish comes before"
        compute = self._device.compute
        for event in self._ready:
            compute.wait(event)
        compute.launch(self._copies.run)
        self._copied = self._device.event()
        compute.record(self._copied)
        moved = self._refresh()
        self._state, self.is_torn = "over", False  # memory goes later, not on this thread
        return moved

    def settle(self) -> None:
        """Behind `commit`: wait until the copies are done, and give the memory back. Another
        process may then change the tensors that it has shared."""
        if self._copied is not None:
            self._copied.wait()
        self.drop()

    def drop(self) -> None:
        """Give spare tensors back; see `Stage`. With staging "none" a model stays torn."""
        self._state, self._copies = "over", None
        self._spare, self._embedding, self._twins, self._ready = {}, {}, [], []
        pieces, self._pieces = list(self._pieces.values()), {}
        let_go(pieces)
        let_go(self._later)

    def _begin(self) -> None:
        """Before a call that may fail: none comes after one that has."""
        if self._state != "open":
            raise UpdateError(f"this round is {self._state}: drop it, and begin another.")
        self._state = "torn by a fault"

    def _end(self) -> None:
        self._state = "open"
        event = self._device.caller_event()
        if event is not None:
            self._ready.append(event)

    # Before a byte moves.

    def _is_selected(self, stored: str) -> bool:
        return self._selector == "all" or _is_draft(stored) == (self._selector == "draft")

    def _target(self, name: str) -> Tensor:
        """The tensor that what comes for a weight is written to, made when it is first asked
        for."""
        held = self._held[name]
        if not self.plan.spare_bytes:
            assert isinstance(held.parameter, Tensor), "see _check_rounds"
            return held.parameter
        if name not in self._spare:
            self._spare[name] = self._new_spare(held)
        return self._spare[name]

    def _new_spare(self, held: _Held) -> Tensor:
        like, device = held.parameter, self._device
        elements = math.prod(like.shape)
        try:
            if self.plan.staging == "host":
                spare = device.host_buffer(elements, like.dtype, is_zero=False).view(like.shape)
            else:
                spare = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        except RuntimeError as error:  # of torch, which found no memory
            size = elements * like.dtype.itemsize
            raise UpdateError(
                f"no memory for {held.weight.stored!r}, {size:,} bytes on the "
                f"{self.plan.staging}: use staging='direct' or staging='none'."
            ) from error
        if self._partial:
            spare.copy_(widened(like))
        else:
            clear_padding(held.weight, spare)
        return spare

    # A tensor comes.

    def _fit(
        self, sent: str, table: NameTable, known: Known, shape: Shape
    ) -> list[tuple[Weight, Parts]]:
        """The weights of this rank that a tensor is part of, and its pieces."""
        whole, fitting = known.shape, []
        shards = set[Shape]()
        for weight in known.held:
            if weight.name not in self._held:
                raise UpdateError(
                    f"tensor {sent!r} is not part of a round with selector={self._selector!r}: "
                    "leave it out, or begin the round with selector='all'."
                )
            part, every = self._pieces_of(table, weight).of(known)
            if self.takes_shards:
                shards |= {piece.shape for piece in every if piece.is_alone} - {whole}
            if shape == whole or shape in shards:
                pieces = [each for each in every if each.is_alone == (shape != whole)]
                fitting.append((weight, Parts(part, pieces)))
        if shape != whole and shape not in shards:
            also = "".join(f", or {list(each)} (this rank's shard)" for each in shards)
            raise UpdateError(
                f"tensor {sent!r} has the wrong shape: expected {list(whole)}{also}, got "
                f"{list(shape)}."
            )
        return fitting

    def _take(self, sent: str, tensor: Tensor) -> None:
        found = self._names.find(sent)
        if found is None:
            return
        tensor = checked(sent, tensor)
        self._check_place(sent, tensor)
        fitting = self._fit(sent, *found, tuple(tensor.shape))
        for weight, (part, pieces) in fitting:
            if self.plan.staging != "direct":
                self._check_finite(sent, tensor, self._held[weight.name].parameter.dtype)
            is_scaled = found[0].kind == HUGGINGFACE and (weight.scale, weight.offset) != (1, 0)
            writes = [
                Write(sent, place, tensor if is_alone else tensor[region], weight, is_scaled)
                for region, place, is_alone in pieces
            ]
            self._write(sent, weight, part, writes)

    def _check_place(self, sent: str, tensor: Tensor) -> None:
        """Raise if the engine's thread would have to make the copy itself, and no step could run
        for seconds: CUDA copies in order from pinned memory alone."""
        place = self._device.torch_device
        is_elsewhere = tensor.device.type == "cpu" and place.type != "cpu"
        if self.plan.staging == "direct" and is_elsewhere and not tensor.is_pinned():
            raise UpdateError(
                f"tensor {sent!r} lies in the host's pageable memory: with staging='direct' send "
                f"tensors on {place} or pinned ones, or use staging='device' or 'host'."
            )

    def _write(self, sent: str, weight: Weight, part: int | str, writes: list[Write]) -> None:
        is_direct = self.plan.staging == "direct"
        if self._architecture.tie_word_embeddings and weight.stored == EMBEDDING:
            first = self._embedding.setdefault(weight.name, writes)
            if first[0].sent != sent:  # one weight, sent under both of its names
                twins = list(zip(first, writes, strict=True))
                self._twins += twins if is_direct else []
                for pair in () if is_direct else twins:
                    check_twins(*pair)
                if (weight.name, sent) in self._twin_names:
                    self._doubled.append(sent)
                self._twin_names.add((weight.name, sent))
                return
        held = self._held[weight.name]
        if not held.mark(part, sum(write.place.numel() for write in writes)):
            self._doubled.append(sent)
        if is_direct:
            self._later += writes
            return
        self.is_torn |= self.plan.staging == "none"
        for number, write in enumerate(writes):
            write.run()
            writes[number] = write._replace(values=write.place)  # the sender's may change

    def _pieces_of(self, table: NameTable, weight: Weight) -> Pieces:
        if id(weight) not in self._pieces:
            self._pieces[id(weight)] = table.pieces(weight, self._target(weight.name))
        return self._pieces[id(weight)]

    def _missing(self) -> list[str]:
        """Names of what was not written, in the kind that came."""
        table, missing = self._names.table(), list[str]()
        for held in self._held.values():
            if held.written >= held.elements:
                continue
            names = table.names(held.weight)
            pieces, parts = self._pieces_of(table, held.weight), dict[int | str, str]()
            for name, known in names.items():
                part, every = pieces.of(known)
                if part not in held.parts and any(piece.place.numel() for piece in every):
                    parts.setdefault(part, name)
            # Of Megatron's names the first is of the whole weight, the others of parts.
            is_whole = table.kind != HUGGINGFACE and not held.written
            missing += list(names)[:1] if is_whole or not parts else parts.values()
        return missing

    def _check_finite(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if self._checks_finite and not torch.isfinite(tensor.to(dtype)).all():
            raise UpdateError(
                f"tensor {name!r} holds NaN or infinite numbers (in {dtype}): the trainer's "
                "step has failed, or begin the round with checks_finite=False."
            )


def _elements(weight: Weight) -> int:
    """Count of a rank's elements, but for rows of padding."""
    if weight.experts or weight.strips or weight.partition_dim != 0:
        return math.prod(weight.shape)
    regions = map(weight.held, weight.parts)
    return sum(math.prod(part.stop - part.start for part in region) for region in regions)


def _check_rounds(stored: str, into: QuantisedWeight, staging: str) -> None:
    """Raise if new numbers cannot be rounded into a quantised weight's memory."""
    if not can_quantise(into):
        raise UpdateError(
            f"weight {stored!r} is kept as {into.form.words}, to which new numbers are not rounded:"
            " start the engine with quantization='none'."
        )
    if staging in ("direct", "none"):
        raise UpdateError(
            f"staging={staging!r} writes where weights are, and {stored!r} is kept as "
            f"{into.form.words}: use staging='device' or 'host', whose commit rounds."
        )


def _is_draft(name: str) -> bool:
    return name.startswith("mtp.")


def _check_same(ours: ModelArchitecture, theirs: ModelArchitecture, where: str) -> None:
    """Raise if a folder's model computes something else, by its configuration."""
    mine, other = ours.to_dict(), theirs.to_dict()
    for name, value in mine.items():
        if name in _OTHER_FACTS or name.startswith("mtp_"):
            continue
        if other.get(name) != value:
            raise UpdateError(
                f"folder {where!r} is of another model: its {name} is {other.get(name)!r}, that "
                f"of the engine's model {value!r}."
            )
