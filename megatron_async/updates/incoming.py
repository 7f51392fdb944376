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
from collections import defaultdict
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

HUGGINGFACE, MEGATRON, GPT = "huggingface", "megatron", "megatron_gpt"
KINDS = (HUGGINGFACE, MEGATRON, GPT)
NAMES = ("auto", *KINDS)
_HINTS = {
    "lora_": "merge adapters into the weights before they are sent.",
    "base_layer": "merge adapters into the weights before they are sent.",
    "weight_scale": "send weights as they are trained, not quantised.",
    "delta": "send whole weights, not their differences.",
}
"""Parts of unknown names, and the remedy."""
_EXPERTS = re.compile(r"\.experts\.(linear_fc[12])\.weight$")


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


class NameTable:
    """All names of one kind that a model's tensors may have.

    Args:
        kind: of the names.
        architecture: of the whole model.
        shard: what this rank holds.

    Attributes:
        shapes: of the whole tensor, by name.
        stored: keys of the weights that a tensor is part of, by name (`Weight.stored`).
        held: those of which this rank has a part, by name.
        most_elements: of the largest tensor.
    """

    def __init__(self, kind: str, architecture: ModelArchitecture, shard: Shard) -> None:
        self.kind = kind
        self.shapes: dict[str, Shape] = {}
        self.stored: dict[str, list[str]] = defaultdict(list)
        self.held: dict[str, list[Weight]] = defaultdict(list)
        self._prefixes: dict[str, list[str]] = {}
        a, all_of_it = architecture, Shard(with_mtp=bool(architecture.mtp_pattern))
        for modules in (False, True) if kind == HUGGINGFACE else (False,):
            known = set(self.shapes)
            for weight in weights(a, all_of_it, modules, modules):
                self._prefixes.setdefault(weight.stored, self._megatron_names(weight))
                for name, shape in self._shapes_of(weight).items():
                    if name not in known:
                        self.shapes[name] = shape
                        self.stored[name].append(weight.stored)
            for weight in weights(a, shard, modules, modules):
                for name in self._shapes_of(weight).keys() - known:
                    self.held[name].append(weight)
        self._same_as: dict[str, str] = {}
        if a.tie_word_embeddings:
            ends = [(OUTPUT, next(iter(self.shapes)))]
            if kind == HUGGINGFACE:
                both = [names_of(a.model_type, modules, gated=False) for modules in (False, True)]
                ends = [(names.output, names.embedding) for names in both]
            for output, embedding in ends:
                self.shapes[output] = self.shapes[embedding]
                self.stored[output] = self.stored[embedding]
                self.held[output] = self.held[embedding]
                self._same_as[embedding] = output
        self.most_elements = max(map(math.prod, self.shapes.values()))

    def pieces(self, weight: Weight, tensor: Tensor) -> dict[str, list[Piece]]:
        """What each tensor brings to a weight, as views of a tensor like the weight's parameter:
        the pieces of a whole one, or this rank's shard, which `is_alone`."""
        of = self._parts if self.kind == HUGGINGFACE else self._wholes
        found = of(weight, tensor)
        for embedding, output in self._same_as.items():
            if embedding in found:
                found[output] = found[embedding]
        return found

    def _parts(self, weight: Weight, tensor: Tensor) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = defaultdict(list)
        for name, region, place in weight.pieces(tensor):
            found[name].append(Piece(region, place))
        for pieces in found.values():
            if len(pieces) == 1:  # of several strips no tensor is a rank's shard
                pieces.append(pieces[0]._replace(is_alone=True))
        return found

    def _wholes(self, weight: Weight, tensor: Tensor) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = defaultdict(list)
        first = weight.shard.experts_of(weight.experts).start
        whole = [(origin, place, False) for origin, place in weight.whole_pieces(tensor)]
        shard = ([first] + [0] * (tensor.dim() - 1), tensor, True)
        for prefix in self._prefixes[weight.stored]:
            for origin, place, is_alone in (*whole, shard):
                region = _region(origin, place)
                found[prefix].append(Piece(region, place, is_alone))
                for number, expert in enumerate(place if weight.experts else ()):
                    for name in _expert_names(prefix, first + number):
                        found[name].append(Piece(region[1:], expert, is_alone))
            if weight.is_stored_in_strips:
                for suffix, origin, place in weight.stored_pieces(tensor):
                    piece = Piece(_region(origin, place), place)
                    found[prefix + suffix] = [piece, piece._replace(is_alone=True)]
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
            for expert in range(weight.experts):
                found |= dict.fromkeys(_expert_names(prefix, expert), weight.whole_shape[1:])
            if weight.is_stored_in_strips:
                found |= {prefix + end: shape for end, shape in weight.stored_suffixes.items()}
        return found


def _region(origin: list[int], place: Tensor) -> Region:
    return tuple(slice(first, first + n) for first, n in zip(origin, place.shape, strict=True))


def _expert_names(prefix: str, expert: int) -> list[str]:
    """Names of one expert's part of a weight of all experts, in Megatron's modules."""
    if not _EXPERTS.search(prefix) or ".experts.experts." in prefix:
        return []
    one = _EXPERTS.sub(rf".experts.local_experts.{expert}.\1.weight", prefix)
    return [one, f"{prefix}{expert}"]


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
        self._tables: dict[str, NameTable] = {}

    def table(self, kind: str = "") -> NameTable:
        """The table of a kind, or of the kind that came."""
        kind = kind or self._kinds[0]
        if kind not in self._tables:
            self._tables[kind] = _table(kind, self._architecture, self._shard)
        return self._tables[kind]

    def find(self, sent: str) -> tuple[NameTable, str] | None:
        """The table that has the tensor, and its name there; None for what a model without its
        tower, or without its MTP, has no place for.

        Raises:
            UpdateError: there is no such tensor, or nobody can tell which it is.
        """
        name = self._plain(sent)
        if name is None:
            return None
        kinds = self._kinds
        if not name.startswith("mtp.") and name in self.table().shapes:
            kinds = kinds[:1]  # and Megatron's tables need not be made
        found = [table for table in map(self.table, kinds) if name in table.shapes]
        if not found:
            raise UpdateError(self._unknown(sent, name))
        if len({tuple(table.stored[name]) for table in found}) > 1:
            raise UpdateError(
                f"tensor {sent!r}: names='auto' cannot tell whether layers are counted as in "
                f"Megatron's HybridModel or GPTModel: say names={MEGATRON!r} or names={GPT!r}."
            )
        if len(found) == 1:
            self._kinds = (found[0].kind,)
        return found[0], name

    def _plain(self, sent: str) -> str | None:
        """A name without what wrappers and towers add."""
        if not isinstance(sent, str):
            raise UpdateError(f"a tensor's name must be a text, not {type(sent).__name__}.")
        a, name = self._architecture, sent
        while name.startswith("module."):
            name = name.removeprefix("module.")
        found, _ = language_model_tensors([name], a.model_type)
        is_draft = name.startswith(("mtp.", mtp_names_of(a.model_type).beginning))
        is_other = name.endswith((FREQUENCIES, EXTRA_STATE)) or not found
        return None if is_other or (is_draft and not self._shard.with_mtp) else next(iter(found))

    def _unknown(self, sent: str, name: str) -> str:
        known = [each for kind in self._kinds for each in self.table(kind).shapes]
        near = difflib.get_close_matches(name[:200], known, n=1)
        hint = next((hint for part, hint in _HINTS.items() if part in name), None)
        hint = hint or (f"did you mean {near[0]!r}?" if near else "send the model's own weights.")
        how = "" if len(self._kinds) > 1 else f" by names of {self._kinds[0]!r}"
        return f"tensor {sent[:200]!r} is not part of this model{how}: {hint}"
