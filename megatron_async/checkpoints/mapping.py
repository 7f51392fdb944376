"""The names of a weight, in every format, and how its parts are laid out: one two-way table.

| format | names |
| --- | --- |
| model | parameters of our `HybridModel`: layer i is `2i` (attention) and `2i + 1` (MLP) |
| Hugging Face | `model.layers.i...`, with q, k, v and gate, up apart; GGUF is translated to these |
| Megatron checkpoint | as the model, but a norm bears the name of the linear layer behind it |
| Megatron checkpoint of a `GPTModel` | layer i is `i`, or all layers are stacked in one tensor |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_async.models.architecture import ModelArchitecture

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter of the model and its names elsewhere.

    The parameter consists of `groups` equal groups of rows; each group holds that group's share of
    every part, in order. So `linear_qkv` is, per KV group, [its q heads, k, v], and `linear_fc1`,
    with one group, is [gate; up].
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

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        shapes = list(self.parts.values())
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

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
        grouped = parameter.view(self.groups, -1, *parameter.shape[1:])
        rows = [shape[0] // self.groups for shape in self.parts.values()]
        return dict(zip(self.parts, grouped.split(rows, dim=1)))

    def split(self, parameter: Tensor) -> dict[str, Tensor]:
        """The parts, as Hugging Face stores them: name -> contiguous tensor."""
        places = self.places(parameter)
        return {name: place.flatten(0, 1).contiguous() for name, place in places.items()}

    def num_elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


def weights(architecture: ModelArchitecture) -> Iterator[Weight]:
    """Every parameter of the architecture's `HybridModel`, in the order of the model."""
    a = architecture

    def plain(name: str, huggingface: str, shape: Shape) -> Weight:
        return Weight(name, {huggingface: shape}, 1, name, None)

    embedding = (a.vocab_size, a.hidden_size)
    yield plain("embedding.word_embeddings.weight", "model.embed_tokens.weight", embedding)
    for layer in range(a.num_layers):
        yield from _attention(a, layer)
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
