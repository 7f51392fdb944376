"""The names of a weight, in every format, and how its parts are laid out: one two-way table.

| format | names |
| --- | --- |
| model | parameters of our `HybridModel`: layer i is `2i` (attention) and `2i + 1` (MLP, experts) |
| Hugging Face | `model.layers.i...`, with q, k, v and gate, up apart; GGUF is translated to these |
| Megatron checkpoint | as the model, but a norm bears the name of the linear layer behind it |
| Megatron checkpoint of a `GPTModel` | layer i is `i`, or all layers are stacked in one tensor |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_async.models.architecture import ModelArchitecture

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter of the model and its names elsewhere.

    The parameter consists of `groups` equal groups of rows; each group holds that group's share of
    every part, in order. So `linear_qkv` is, per KV group, [its q heads, k, v], and `linear_fc1`,
    with one group, is [gate; up]. The parameter of several experts is theirs one after the other.
    """

    name: str
    """Parameter of the `HybridModel`."""
    parts: dict[str, Shape]
    """Hugging Face tensors that it is made of, with their shapes."""
    groups: int
    stored: str
    """Key in a Megatron checkpoint of the `HybridModel`."""
    layer: int | None
    """Transformer layer, None outside the layers."""
    experts: int = 0
    """Experts that the parameter holds, `[experts, rows, ...]`; 0: it has no such dimension."""
    first_expert: int = 0
    """Number of the first of them."""

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        shapes = list(self.parts.values())
        if self.is_stacked:
            return shapes[0]
        rows = sum(shape[0] for shape in shapes)
        lead = (self.experts, rows // self.experts) if self.experts else (rows,)
        return (*lead, *shapes[0][1:])

    @property
    def is_stacked(self) -> bool:
        """Whether one Hugging Face tensor holds all experts, `[experts, rows, ...]`."""
        return self.experts > 0 and len(next(iter(self.parts.values()))) == 3

    def of_experts(self, first: int, count: int) -> Weight:
        """The same weight of some of its experts; a weight of no experts is returned as it is."""
        if not self.experts:
            return self
        if self.is_stacked:
            parts = {name: (count, *shape[1:]) for name, shape in self.parts.items()}
        else:
            each = len(self.parts) // self.experts
            parts = dict(list(self.parts.items())[first * each : (first + count) * each])
        return replace(self, parts=parts, experts=count, first_expert=first)

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
        """Where the parts lie in the parameter: Hugging Face name -> view
        `[groups, rows of the part / groups, ...]`."""
        rest = next(iter(self.parts.values()))[1:]
        grouped = parameter.view(self.groups, -1, *rest)
        rows = [shape[0] // self.groups for shape in self.parts.values()]
        return dict(zip(self.parts, grouped.split(rows, dim=1)))

    def split(self, parameter: Tensor) -> dict[str, Tensor]:
        """The parts, as Hugging Face stores them: name -> contiguous tensor."""
        places = self.places(parameter)
        return {name: place.flatten(0, 1).contiguous() for name, place in places.items()}

    def num_elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


def weights(
    architecture: ModelArchitecture, stacked_experts: bool = False
) -> Iterator[Weight]:
    """Every parameter of the architecture's `HybridModel`, in the order of the model.

    Args:
        architecture: of the model.
        stacked_experts: Hugging Face's names are those of transformers' modules, where a tensor
            holds all experts, instead of those of published files, where it holds one.
    """
    a = architecture

    def plain(name: str, huggingface: str, shape: Shape) -> Weight:
        return Weight(name, {huggingface: shape}, 1, name, None)

    embedding = (a.vocab_size, a.hidden_size)
    yield plain("embedding.word_embeddings.weight", "model.embed_tokens.weight", embedding)
    for layer in range(a.num_layers):
        yield from _attention(a, layer)
        if a.is_moe(layer):
            yield from _moe(a, layer, stacked_experts)
        else:
            yield from _mlp(a, layer)
    yield plain("decoder.final_norm.weight", "model.norm.weight", (a.hidden_size,))
    if not a.tie_word_embeddings:
        yield plain("output_layer.weight", "lm_head.weight", embedding)


def _attention(a: ModelArchitecture, layer: int) -> Iterator[Weight]:
    ours, theirs = f"decoder.layers.{2 * layer}.", f"model.layers.{layer}."
    linear = ours + "self_attention.linear_"
    hidden = a.hidden_size
    q, kv = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    rows = {"q": q, "k": kv, "v": kv}

    def weight(name: str, parts: dict[str, Shape], groups: int = 1, stored: str = "") -> Weight:
        named = {theirs + part: shape for part, shape in parts.items()}
        return Weight(name, named, groups, stored or name, layer)

    yield weight(
        ours + "input_layernorm.weight",
        {"input_layernorm.weight": (hidden,)},
        stored=linear + "qkv.layer_norm_weight",
    )
    yield weight(linear + "proj.weight", {"self_attn.o_proj.weight": (hidden, q)})
    yield weight(
        linear + "qkv.weight",
        {f"self_attn.{part}_proj.weight": (n, hidden) for part, n in rows.items()},
        a.num_query_groups,
    )
    if a.add_qkv_bias:
        yield weight(
            linear + "qkv.bias",
            {f"self_attn.{part}_proj.bias": (n,) for part, n in rows.items()},
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
    yield Weight(fc1 + "weight", gate_up, 1, fc1 + "weight", layer)
    down: dict[str, Shape] = {theirs + "mlp.down_proj.weight": (hidden, ffn)}
    yield Weight(fc2 + "weight", down, 1, fc2 + "weight", layer)


def _moe(a: ModelArchitecture, layer: int, stacked: bool) -> Iterator[Weight]:
    ours, theirs = f"decoder.layers.{2 * layer + 1}.", f"model.layers.{layer}."
    hidden, ffn, experts = a.hidden_size, a.moe_ffn_hidden_size, a.num_moe_experts
    mixtral = a.model_type == "mixtral" and not stacked
    block = theirs + ("block_sparse_moe." if mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    norm, router = ours + "pre_mlp_layernorm.weight", ours + "mlp.router.weight"
    yield Weight(norm, {theirs + "post_attention_layernorm.weight": (hidden,)}, 1, norm, layer)
    yield Weight(router, {block + "gate.weight": (experts, hidden)}, 1, router, layer)
    for name, joint, parts, shape in (
        ("fc1", "gate_up_proj", (gate, up), (ffn, hidden)),
        ("fc2", "down_proj", (down,), (hidden, ffn)),
    ):
        linear = f"linear_{name}.weight"
        if stacked:
            named = {f"{block}experts.{joint}": (experts, len(parts) * shape[0], shape[1])}
        else:
            each = [(expert, part) for expert in range(experts) for part in parts]
            named = {f"{block}experts.{expert}.{part}.weight": shape for expert, part in each}
        yield Weight(
            f"{ours}mlp.experts.{linear}",
            dict(named),
            1,
            f"{ours}mlp.experts.experts.{linear}",
            layer,
            experts,
        )
