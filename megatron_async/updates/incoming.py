"""What a trainer's tensor is, by its name: the weights of this rank that it is part of, and where.

A consumer of the table of `checkpoints/mapping.py`, as the readers of checkpoints are. Numbers of
layers and experts are always those of the whole model.

| kind of names | what a tensor is |
| --- | --- |
| "huggingface" | a tensor of published files, or of transformers' modules (all experts in one) |
| "megatron" | a weight of a `HybridModel` or of its checkpoint, of all experts or of one |
| "megatron_gpt" | the same of a `GPTModel`, where a layer is two of the pattern |
"""

from __future__ import annotations

import difflib
import math
import re
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from megatron_async.checkpoints.family_names import mtp_names_of, names_of
from megatron_async.checkpoints.huggingface import FREQUENCIES
from megatron_async.checkpoints.huggingface_delta import language_model_tensors
from megatron_async.checkpoints.mapping import Region, Shape, Shard, Weight, weights
from megatron_async.checkpoints.weight import EXTRA_STATE, gpt_name
from megatron_async.errors import UpdateError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.pipeline import OUTPUT
from megatron_async.updates.writes import giving_way

HUGGINGFACE, MEGATRON, GPT = "huggingface", "megatron", "megatron_gpt"
KINDS = (HUGGINGFACE, MEGATRON, GPT)
NAMES = ("auto", *KINDS)
WHOLE = ""
"""Stands for all parts of a weight."""
_HINTS = {
    "lora_": "merge adapters into the weights before they are sent.",
    "base_layer": "merge adapters into the weights before they are sent.",
    "weight_scale": "send weights as they are trained, not quantised.",
    "delta": "send whole weights, not their differences.",
}
"""Parts of unknown names, and the remedy."""
_ONE_EXPERT = re.compile(
    r"(?P<experts>.*(?<!\.experts)\.experts\.)(?:"
    r"local_experts\.(?P<number>0|[1-9][0-9]{0,8})\.(?P<matrix>linear_fc[12])\.weight|"
    r"(?P<its_matrix>linear_fc[12])\.weight(?P<its_number>0|[1-9][0-9]{0,8}))"
)
"""One expert's part of a weight of all experts, in Megatron's modules."""


class Piece(NamedTuple):
    """A region of a whole tensor and the view of a parameter that it fills."""

    region: Region
    place: Tensor
    is_alone: bool = False
    """Whether a tensor of the region's shape may come instead: this rank's shard."""

    @property
    def shape(self) -> Shape:
        """Shape of the region."""
        return tuple(part.stop - part.start for part in self.region)


class Known(NamedTuple):
    """A tensor that may come, by its name in one kind of names."""

    entry: str
    """The name; of one expert's part the name of the weight of all experts."""
    shape: Shape
    """Shape of the whole tensor."""
    stored: list[str]
    """Keys of the weights that it is part of (`Weight.stored`)."""
    held: list[Weight]
    """Weights of this rank that it is part of."""
    expert: int | None = None
    """Number of the one expert."""

    def one(self, expert: int) -> Known:
        """The part of one expert in a tensor of all."""
        return self._replace(shape=self.shape[1:], expert=expert)


class Parts(NamedTuple):
    """What a tensor brings to a weight."""

    part: int | str
    """Which of the weight's parts it is, the same for all names of it."""
    pieces: list[Piece]


class Pieces:
    """What each tensor of a table brings to one weight, as views of a tensor like the weight's
    parameter: the pieces of a whole one, or this rank's shard, which `is_alone`.

    Args:
        named: by the names of the table.
        experts: that are here.
    """

    def __init__(self, named: dict[str, Parts], experts: range) -> None:
        self._named, self._experts = named, experts

    def of(self, known: Known) -> Parts:
        """What one tensor brings: nothing where its expert is not here."""
        found = self._named.get(known.entry, _NOTHING)
        if known.expert is None:
            return found
        if known.expert not in self._experts:
            return _NOTHING
        row = known.expert - self._experts.start
        each = [Piece(p.region[1:], p.place[row], p.is_alone) for p in found.pieces]
        return Parts(known.expert, each)


_NOTHING = Parts(WHOLE, [])


class NameTable:
    """All names of one kind that a model's tensors may have. Names of single experts' parts of
    Megatron's weights, tens of thousands, are not in it: they are read.

    Args:
        kind: of the names.
        architecture: of the whole model.
        shard: what this rank holds.

    Attributes:
        entries: by name.
        most_elements: of the largest tensor.
    """

    def __init__(self, kind: str, architecture: ModelArchitecture, shard: Shard) -> None:
        self.kind = kind
        self.entries: dict[str, Known] = {}
        self._prefixes: dict[str, list[str]] = {}
        a, all_of_it = architecture, Shard(with_mtp=bool(architecture.mtp_pattern))
        for modules in (False, True) if kind == HUGGINGFACE else (False,):
            before = set(self.entries)
            for weight in giving_way(weights(a, all_of_it, modules, modules)):
                self._prefixes.setdefault(weight.stored, self._megatron_names(weight))
                for name, shape in self._shapes_of(weight).items():
                    if name not in before:
                        known = self.entries.setdefault(name, Known(name, shape, [], []))
                        known.stored.append(weight.stored)
            for weight in giving_way(weights(a, shard, modules, modules)):
                for name in self._shapes_of(weight):
                    if name not in before:
                        self.entries[name].held.append(weight)
        if a.tie_word_embeddings:
            ends = [(OUTPUT, next(iter(self.entries)))]
            if kind == HUGGINGFACE:
                both = [names_of(a.model_type, modules, gated=False) for modules in (False, True)]
                ends = [(names.output, names.embedding) for names in both]
            for output, embedding in ends:
                self.entries[output] = self.entries[embedding]
        self.most_elements = max(math.prod(known.shape) for known in self.entries.values())

    def find(self, name: str) -> Known | None:
        """The tensor of that name; None: there is none."""
        found = self.entries.get(name)
        if found is None and self.kind != HUGGINGFACE and (one := _ONE_EXPERT.fullmatch(name)):
            entry = f"{one['experts']}{one['matrix'] or one['its_matrix']}.weight"
            number = int(one["number"] or one["its_number"])
            whole = self.entries.get(entry)
            if whole is not None and number < whole.shape[0]:
                found = whole.one(number)
        return found

    def names(self, weight: Weight) -> dict[str, Known]:
        """Tensors that make up a weight, by their names; one name of each expert."""
        found = {name: self.entries[name] for name in self._shapes_of(weight)}
        if self.kind != HUGGINGFACE and weight.experts:
            (name, whole), *_ = found.items()
            found |= {f"{name}{number}": whole.one(number) for number in range(weight.experts)}
        return found

    def pieces(self, weight: Weight, tensor: Tensor) -> Pieces:
        """What the tensors bring to a weight."""
        of = self._parts if self.kind == HUGGINGFACE else self._wholes
        return Pieces(of(weight, tensor), weight.shard.experts_of(weight.experts))

    def _parts(self, weight: Weight, tensor: Tensor) -> dict[str, Parts]:
        found = {name: Parts(number, []) for number, name in enumerate(weight.held_parts)}
        for name, region, place in weight.pieces(tensor):
            found[name].pieces.append(Piece(region, place))
        for _, pieces in found.values():
            if len(pieces) == 1:  # of several strips no tensor is a rank's shard
                pieces.append(pieces[0]._replace(is_alone=True))
        return found

    def _wholes(self, weight: Weight, tensor: Tensor) -> dict[str, Parts]:
        first = weight.shard.experts_of(weight.experts).start
        whole = [Piece(_region(*each), each[1]) for each in weight.whole_pieces(tensor)]
        shard = Piece(_region([first] + [0] * (tensor.dim() - 1), tensor), tensor, True)
        found = dict.fromkeys(self._prefixes[weight.stored], Parts(WHOLE, [*whole, shard]))
        if weight.is_stored_in_strips:
            for suffix, origin, place in weight.stored_pieces(tensor):
                piece = Piece(_region(origin, place), place)
                pieces = [piece, piece._replace(is_alone=True)]
                found |= {
                    prefix + suffix: Parts(suffix, pieces)
                    for prefix in self._prefixes[weight.stored]
                }
        return found

    def _megatron_names(self, weight: Weight) -> list[str]:
        """Names of a whole model's weight in the model and in its checkpoints."""
        names = dict.fromkeys((weight.name, weight.stored))
        return list(dict.fromkeys(map(gpt_name, names)) if self.kind == GPT else names)

    def _shapes_of(self, weight: Weight) -> dict[str, Shape]:
        if self.kind == HUGGINGFACE:
            return weight.parts
        found: dict[str, Shape] = {}
        for prefix in self._prefixes[weight.stored]:
            found[prefix] = weight.whole_shape
            if weight.is_stored_in_strips:
                found |= {prefix + end: shape for end, shape in weight.stored_suffixes.items()}
        return found


def _region(origin: list[int], place: Tensor) -> Region:
    return tuple(slice(first, first + n) for first, n in zip(origin, place.shape, strict=True))


_table = lru_cache(maxsize=2 * len(KINDS))(NameTable)
"""Tables are the same in each round, and take a second where there are 20,000 tensors."""


class Names:
    """Finds a tensor by the name under which it was sent.

    Args:
        kind: of the names, one of `NAMES`. With "auto" the first name that one kind alone has
            decides.
        architecture, shard: as for `NameTable`.
    """

    def __init__(self, kind: str, architecture: ModelArchitecture, shard: Shard) -> None:
        self._architecture, self._shard = architecture, shard
        every = KINDS if architecture.layers_per_block == 2 else KINDS[:2]
        self._kinds = every if kind == "auto" else (kind,)
        self._drafts = "mtp.", mtp_names_of(architecture.model_type).beginning
        self._tables: dict[str, NameTable] = {}

    def table(self, kind: str = "") -> NameTable:
        """The table of a kind, or of the kind that came."""
        kind = kind or self._kinds[0]
        if kind not in self._tables:
            self._tables[kind] = _table(kind, self._architecture, self._shard)
        return self._tables[kind]

    def find(self, sent: str) -> tuple[NameTable, Known] | None:
        """The table that has the tensor, and what it is there; None for what a model without its
        tower, or without its MTP, has no place for.

        Raises:
            UpdateError: there is no such tensor, or nobody can tell which it is.
        """
        kinds = self._kinds
        if len(kinds) == 1 and isinstance(sent, str) and not sent.startswith(self._drafts):
            table = self.table()
            if (known := table.entries.get(sent)) is not None:  # most are
                return table, known
        name = self._plain(sent)
        if name is None:
            return None
        if not name.startswith("mtp.") and name in self.table().entries:
            kinds = kinds[:1]  # and Megatron's tables need not be made
        tables = [(table, table.find(name)) for table in map(self.table, kinds)]
        found = [(table, known) for table, known in tables if known is not None]
        if not found:
            raise UpdateError(self._unknown(sent, name))
        if len({tuple(known.stored) for _, known in found}) > 1:
            raise UpdateError(
                f"tensor {sent!r}: names='auto' cannot tell whether layers are counted as in "
                f"Megatron's HybridModel or GPTModel: say names={MEGATRON!r} or names={GPT!r}."
            )
        if len(found) == 1:
            self._kinds = (found[0][0].kind,)
        return found[0]

    def _plain(self, sent: str) -> str | None:
        """A name without what wrappers and towers add."""
        if not isinstance(sent, str):
            raise UpdateError(f"a tensor's name must be a text, not {type(sent).__name__}.")
        a, name = self._architecture, sent
        while name.startswith("module."):
            name = name.removeprefix("module.")
        found, _ = language_model_tensors([name], a.model_type)
        is_draft = name.startswith(self._drafts)
        is_other = name.endswith((FREQUENCIES, EXTRA_STATE)) or not found
        return None if is_other or (is_draft and not self._shard.with_mtp) else next(iter(found))

    def _unknown(self, sent: str, name: str) -> str:
        known = [each for kind in self._kinds for each in self.table(kind).entries]
        near = difflib.get_close_matches(name[:200], known, n=1)
        hint = next((hint for part, hint in _HINTS.items() if part in name), None)
        hint = hint or (f"did you mean {near[0]!r}?" if near else "send the model's own weights.")
        if "experts" in name and (experts := self._architecture.num_moe_experts):
            hint += f" Experts are 0 to {experts - 1}."
        how = "" if len(self._kinds) > 1 else f" by names of {self._kinds[0]!r}"
        return f"tensor {sent[:200]!r} is not part of this model{how}: {hint}"
