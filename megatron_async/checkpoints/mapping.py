"""The names of a weight, in every format, and how its parts are laid out: one two-way table.

| format | names |
| --- | --- |
| model | parameters of our `HybridModel`: layer i is `2i` (attention) and `2i + 1` (MLP, experts) |
| Hugging Face | `model.layers.i...`, with q, k, v and gate, up apart; GGUF is translated to these |
| Megatron checkpoint | as the model, but a norm bears the name of the linear layer behind it |
| Megatron checkpoint of a `GPTModel` | layer i is `i`, or all layers are stacked in one tensor |

A rank of many holds a `Shard` of the model. What it holds of a weight follows from one declared
thing, the axis along which the weight is split; loaders ask `Weight.held` and `Weight.places`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.pipeline import EMBEDDING, OUTPUT, Stage, stage_of

Shape = tuple[int, ...]
Region = tuple[slice, ...]
"""A slice of each axis of a stored tensor, with start and stop."""


@dataclass(frozen=True)
class Shard:
    """Which part of a model a rank holds; by default, all of it."""

    tensor_rank: int = 0
    """Of the rank in its tensor-parallel group."""
    tensor_size: int = 1
    """Ranks of that group."""
    expert_rank: int = 0
    """Of the rank in its expert-parallel group."""
    expert_size: int = 1
    """Ranks of that group."""
    stage: Stage | None = None
    """Its pipeline stage; None: the only one."""

    @classmethod
    def of(cls, model: nn.Module) -> Shard:
        """The part that a Megatron model was built for."""
        groups = getattr(model, "pg_collection", None)
        stage = stage_of(getattr(model, "config", None))
        stage_or_none = stage if stage.count > 1 else None
        if groups is None:
            return cls(stage=stage_or_none)
        tensor, expert = groups.tp, groups.ep
        return cls(tensor.rank(), tensor.size(), expert.rank(), expert.size(), stage_or_none)

    def local_name(self, name: str) -> str | None:
        """A parameter's name in this rank's model, from that in the whole one; None: not held."""
        return name if self.stage is None else self.stage.local_name(name)

    def experts_of(self, count: int) -> range:
        """This rank's of so many experts; they divide."""
        share = count // self.expert_size
        return range(self.expert_rank * share, (self.expert_rank + 1) * share)

    def range_of(self, size: int) -> range:
        """This rank's indices of an axis of that size: an equal share, the last ones less where it
        does not divide."""
        share = -(-size // self.tensor_size)
        first = min(self.tensor_rank * share, size)
        return range(first, min(first + share, size))


@dataclass(frozen=True)
class Weight:
    """One parameter of the model and its names elsewhere.

    The parameter consists of `groups` equal groups of rows; each group holds that group's share of
    every part, in order. So `linear_qkv` is, per KV group, [its q heads, k, v], and `linear_fc1`,
    with one group, is [gate; up]. The parameter of several experts is theirs one after the other.
    """

    name: str
    """Parameter of this rank's `HybridModel`."""
    parts: dict[str, Shape]
    """Hugging Face tensors that it is made of, with their shapes."""
    groups: int
    stored: str
    """Key in a Megatron checkpoint of the `HybridModel`, which is that of the whole model."""
    layer: int | None
    """Transformer layer, None outside the layers."""
    partition_dim: int | None = None
    """Axis along which tensor-parallel ranks share the weight, by Megatron's name: 0, rows (of each
    part, or whole groups), 1, columns, or None: every rank holds all of it. Where an axis does not
    divide (the vocabulary), the parameter has rows of padding at its end."""
    shard: Shard = Shard()
    """What this rank holds."""

    experts: int = 0
    """Experts of a weight `[experts, rows, columns]`, spread over expert-parallel ranks; its
    `partition_dim` counts the axes of one expert. 0: there is no such axis."""

    @property
    def is_stacked(self) -> bool:
        """Whether one Hugging Face tensor holds all experts."""
        return self.experts > 0 and len(next(iter(self.parts.values()))) == 3

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
        linear layer behind it, as Megatron's checkpoints do."""
        return self.shard.local_name(self.stored)

    @property
    def whole_shape(self) -> Shape:
        """Shape of the whole weight, on all ranks together, without padding."""
        shapes = list(self.parts.values())
        if self.is_stacked:
            return shapes[0]
        rows = sum(shape[0] for shape in shapes)
        lead = (self.experts, rows // self.experts) if self.experts else (rows,)
        return (*lead, *shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """Shape of the parameter on this rank."""
        shape = list(self.whole_shape)
        if self.experts:
            shape[0] = len(self.shard.experts_of(self.experts))
        if self.partition_dim is not None:
            dim = self.partition_dim + (self.experts > 0)
            shape[dim] = -(-shape[dim] // self.shard.tensor_size)
        return tuple(shape)

    def held(self, part: str) -> Region:
        """Which region of a part, as it is stored, this rank holds: a slice of each axis."""
        ranges = [range(size) for size in self.parts[part]]
        if self.is_stacked:
            ranges[0] = self.shard.experts_of(self.experts)
        elif self.partition_dim is not None:
            dim = self.partition_dim
            ranges[dim] = self.shard.range_of(len(ranges[dim]))
        return tuple(slice(held.start, held.stop) for held in ranges)

    @property
    def stored_gpt(self) -> str:
        """Key in a Megatron checkpoint of the deprecated `GPTModel`."""
        if self.layer is None:
            return self.stored.replace("final_norm", "final_layernorm")
        return re.sub(r"layers\.\d+\.", f"layers.{self.layer}.", self.stored)

    @property
    def stored_stacked(self) -> str:
        """Key in a `GPTModel` checkpoint whose layers are stacked: `[layers, *shape]` there."""
        return re.sub(r"layers\.\d+\.", "layers.", self.stored_gpt)

    def places(self, parameter: Tensor) -> dict[str, Tensor]:
        """Where what is held of the parts lies in the parameter: Hugging Face name -> view
        `[groups, rows of the part / groups, ...]`. Rows of padding are in no place."""
        groups = self.groups
        if self.partition_dim == 0 and groups > 1:
            groups //= self.shard.tensor_size
        has_experts = self.experts > 0 and not self.is_stacked
        grouped = parameter.view(groups, -1, *parameter.shape[2 if has_experts else 1 :])
        held = {part: self.held(part)[0] for part in self.held_parts}
        rows = [(part.stop - part.start) // groups for part in held.values()]
        padding = grouped.size(1) - sum(rows)
        return dict(zip(held, grouped.split([*rows, padding], dim=1), strict=False))

    def stored_regions(self, parameter: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """The same for a weight that is stored in one piece, as in Megatron's checkpoints: where a
        region of it begins there, and the view of the parameter that it fills."""
        if self.experts:
            yield from self._stored_experts(parameter)
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

    def _stored_experts(self, parameter: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """`[experts, rows, columns]`, where each expert's rows are those of its parts in turn."""
        first = self.shard.experts_of(self.experts).start
        _experts, rows, columns = self.whole_shape
        if self.partition_dim != 0:
            yield [first, 0, self.shard.range_of(columns).start], parameter
            return
        parts = len(self.parts) // self.experts
        for part, place in enumerate(parameter.chunk(parts, dim=1)):
            start = part * rows // parts + self.shard.range_of(rows // parts).start
            yield [first, start, 0], place

    def split(self, parameter: Tensor) -> dict[str, Tensor]:
        """The parts, as Hugging Face stores them: name -> contiguous tensor, of what is held."""
        places = self.places(parameter)
        return {name: place.flatten(0, 1).contiguous() for name, place in places.items()}

    def num_elements(self) -> int:
        """Number of elements of the parameter on this rank."""
        return math.prod(self.shape)


def weights(
    architecture: ModelArchitecture, shard: Shard | None = None, stacked_experts: bool = False
) -> Iterator[Weight]:
    """Every parameter of a rank's `HybridModel`, in the order of the model.

    Where embedding and output layer are tied, the last of several pipeline stages has a copy of the
    embedding in its output layer.

    Args:
        architecture: of the whole model.
        shard: what this rank holds; None: all.
        stacked_experts: Hugging Face's names are those of transformers' modules, where a tensor
            holds all experts, instead of those of published files, where it holds one's.
    """
    shard = shard or Shard()
    for weight in _whole_weights(architecture, stacked_experts):
        name = shard.local_name(weight.name)
        if name is not None:
            yield replace(weight, name=name, shard=shard)
    stage = shard.stage
    if stage is not None and stage.is_last and architecture.tie_word_embeddings:
        embedding = next(_whole_weights(architecture, stacked_experts))
        yield replace(embedding, name=OUTPUT, shard=shard)


def _whole_weights(a: ModelArchitecture, stacked: bool) -> Iterator[Weight]:
    def plain(name: str, huggingface: str, shape: Shape, dim: int | None) -> Weight:
        return Weight(name, {huggingface: shape}, 1, name, None, dim)

    embedding = (a.vocab_size, a.hidden_size)
    yield plain(EMBEDDING, "model.embed_tokens.weight", embedding, 0)
    for layer in range(a.num_layers):
        yield from _attention(a, layer)
        yield from _moe(a, layer, stacked) if a.is_moe(layer) else _mlp(a, layer)
    yield plain("decoder.final_norm.weight", "model.norm.weight", (a.hidden_size,), None)
    if not a.tie_word_embeddings:
        yield plain(OUTPUT, "lm_head.weight", embedding, 0)


def _attention(a: ModelArchitecture, layer: int) -> Iterator[Weight]:
    ours, theirs = f"decoder.layers.{2 * layer}.", f"model.layers.{layer}."
    linear = ours + "self_attention.linear_"
    hidden = a.hidden_size
    q, kv = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    rows = {"q": q, "k": kv, "v": kv}

    def weight(
        name: str,
        parts: dict[str, Shape],
        dim: int | None = None,
        groups: int = 1,
        stored: str = "",
    ) -> Weight:
        named = {theirs + part: shape for part, shape in parts.items()}
        return Weight(name, named, groups, stored or name, layer, dim)

    yield weight(
        ours + "input_layernorm.weight",
        {"input_layernorm.weight": (hidden,)},
        stored=linear + "qkv.layer_norm_weight",
    )
    yield weight(linear + "proj.weight", {"self_attn.o_proj.weight": (hidden, q)}, 1)
    yield weight(
        linear + "qkv.weight",
        {f"self_attn.{part}_proj.weight": (n, hidden) for part, n in rows.items()},
        0,
        a.num_query_groups,
    )
    if a.add_qkv_bias:
        yield weight(
            linear + "qkv.bias",
            {f"self_attn.{part}_proj.bias": (n,) for part, n in rows.items()},
            0,
            a.num_query_groups,
        )
    if a.qk_layernorm:
        for part in "qk":
            yield weight(
                f"{ours}self_attention.{part}_layernorm.weight",
                {f"self_attn.{part}_norm.weight": (a.kv_channels,)},
            )


def _mlp(a: ModelArchitecture, layer: int) -> Iterator[Weight]:
    ours, theirs = f"decoder.layers.{2 * layer + 1}.", f"model.layers.{layer}."
    hidden, ffn = a.hidden_size, a.ffn_hidden_size
    fc1, fc2 = ours + "mlp.linear_fc1.", ours + "mlp.linear_fc2."
    yield Weight(
        ours + "pre_mlp_layernorm.weight",
        {theirs + "post_attention_layernorm.weight": (hidden,)},
        1,
        fc1 + "layer_norm_weight",
        layer,
    )
    gate_up: dict[str, Shape] = {
        f"{theirs}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")
    }
    yield Weight(fc1 + "weight", gate_up, 1, fc1 + "weight", layer, 0)
    down: dict[str, Shape] = {theirs + "mlp.down_proj.weight": (hidden, ffn)}
    yield Weight(fc2 + "weight", down, 1, fc2 + "weight", layer, 1)


def _moe(a: ModelArchitecture, layer: int, stacked: bool) -> Iterator[Weight]:
    ours, theirs = f"decoder.layers.{2 * layer + 1}.", f"model.layers.{layer}."
    hidden, ffn, experts = a.hidden_size, a.moe_ffn_hidden_size, a.num_moe_experts
    mixtral = a.model_type == "mixtral" and not stacked
    block = theirs + ("block_sparse_moe." if mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    norm, router = ours + "pre_mlp_layernorm.weight", ours + "mlp.router.weight"
    yield Weight(norm, {theirs + "post_attention_layernorm.weight": (hidden,)}, 1, norm, layer)
    yield Weight(router, {block + "gate.weight": (experts, hidden)}, 1, router, layer)
    for name, joint, parts, shape, dim in (
        ("fc1", "gate_up_proj", (gate, up), (ffn, hidden), 0),
        ("fc2", "down_proj", (down,), (hidden, ffn), 1),
    ):
        linear = f"linear_{name}.weight"
        named: dict[str, Shape]
        if stacked:
            named = {f"{block}experts.{joint}": (experts, len(parts) * shape[0], shape[1])}
        else:
            each = [(expert, part) for expert in range(experts) for part in parts]
            named = {f"{block}experts.{expert}.{part}.weight": shape for expert, part in each}
        yield Weight(
            f"{ours}mlp.experts.{linear}",
            named,
            1,
            f"{ours}mlp.experts.experts.{linear}",
            layer,
            dim,
            experts=experts,
        )
