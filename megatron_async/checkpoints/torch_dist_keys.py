"""Under which keys a Megatron checkpoint holds a weight, and which regions of them a rank reads.

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_async.checkpoints.mapping import Shape, Weight

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
    """Its place on the first axis of a tensor that holds all layers; None: of this layer alone."""
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
        """Where a region of the weight is stored.

        Args:
            offset: where in the weight the region begins.
            target: of the region's shape.

        Yields:
            The key of a tensor; where in it a region begins; the view of `target` that it fills.
        """
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
    """How a checkpoint holds weights: `Weight.stored` with one of its suffixes -> that.

    What is not there is given as a `HybridModel`, or a `GPTModel` if it is one, would have it.

    Args:
        wanted: of a whole model.
        num_layers: characters of the model's pattern.
        found: shape of each stored tensor.
    """
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
