"""`layer_program`: which kernels a step of some shape launches, layer by layer, in words.

The layers' own forward runs on the meta device, which has shapes and no memory, with ops that note
what they are called with. So the program is what a step does, and no second description of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.models.attention import stamp_kv_layers
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.models.fitness import check_invariant_layers
from megatron_async.models.held_weight import Operand
from megatron_async.models.layer_ops import bind_ops
from megatron_async.models.norm import fold_norms
from megatron_async.models.rotary import described_frequencies, other_tables
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.linear.product_kernel import new_sums
from megatron_async.ops.linear.products import Choice, choose_for
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.quantised_weight import BLOCK, QuantisedWeight
from megatron_async.ops.linear.rounded_rows import RoundedRows
from megatron_async.ops.linear.stream import Stream

ACTIVATIONS = {"": "", "swiglu": "SwiGLU", "squared_relu": "squared ReLU"}


class NotedOps:
    """The ops of layers, of which each adds its name to `notes` and gives empty results.

    Args:
        major: compute capability of the GPU whose rules count; 0: a CPU.
        names: of products, by the id of their weight.
        is_invariant: as of `Ops`.
    """

    def __init__(self, major: int, names: dict[int, str], is_invariant: bool = False) -> None:
        self.major, self._names, self.notes = major, names, list[str]()
        self.is_invariant = is_invariant

    def product(
        self,
        x: Tensor | Stream,
        weight: Operand,
        bias: Tensor | None = None,
        choice: Choice | None = None,
        added: Tensor | None = None,
        places: QkvPlaces | None = None,
        rounded: RoundedRows | None = None,
    ) -> Tensor:
        """A product and what its kernel includes."""
        rows = (x.rows if isinstance(x, Stream) else x).flatten(0, -2)
        if isinstance(x, Stream) and not x.is_whole and x.residual is not None:
            rows = x.residual
        if choice is None:
            wants = {"bias": bias is not None, "invariant": self.is_invariant}
            choice = choose_for(rows, weight, major=self.major, **wants)
        codes = weight.codes if isinstance(weight, QuantisedWeight) else weight
        met, splits = choice.met, getattr(choice.plan, "splits", 1)
        parts = (
            "norm" if isinstance(x, Stream) and x.weight is not None else "",
            self._names.get(id(codes), "product"),
            "rope" if places is not None else "",
            ACTIVATIONS[met.activation],
            "residual" if added is not None else "",
            "rounding" if rounded is not None else "",
        )
        where = f"{choice.kernel.name}, {splits} parts" if splits > 1 else choice.kernel.name
        self.notes.append(f"{' + '.join(part for part in parts if part)} ({where})")
        if isinstance(x, Stream) and x.squares is None:
            x.total = rows if x.residual is None else torch.empty_like(x.residual)
        outputs = len(weight) // 2 if met.activation == "swiglu" else len(weight)
        if places is not None:
            return places.new_queries(rows, outputs)
        return new_sums(rows, outputs, splits, weight.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """A norm that no product includes."""
        self.notes.append("norm" if residual is None else "residual + norm")
        total = x if residual is None else torch.empty_like(residual)
        return torch.empty_like(total), total

    def few_token_experts(
        self, x: Tensor | Stream, layer: Any, plan: Any, places: Any, dummy: int, added: Any
    ) -> tuple[Tensor, Routing]:
        """A layer of experts for few tokens."""
        if isinstance(x, Stream):
            x.total = x.value if x.residual is None else torch.empty_like(x.residual)
        shared = " + shared expert" if layer.shared_fc1 is not None else ""
        norm = "norm + " if isinstance(x, Stream) else ""
        residual = " + residual" if added is not None else ""
        self.notes.append(f"{norm}routing + experts{shared}{residual} (few tokens, 3 kernels)")
        rows = x.rows if isinstance(x, Stream) else x
        tokens = torch.empty(rows.shape[-2:], dtype=layer.fc1.dtype, device=rows.device)
        return tokens, Routing(tokens, tokens)

    def route(self, x: Tensor, *_: Any) -> Routing:
        """The choice of experts."""
        self.notes.append("routing")
        return Routing(x, x)

    def expert_mlp(self, x: Tensor, *_: Any) -> Tensor:
        """Grouped products of experts."""
        self.notes.append("experts (grouped products)")
        return torch.empty_like(x)

    def __getattr__(self, name: str) -> Any:
        """Other ops, which give rows of the first argument's shape; of SwiGLU half as long."""
        words = name.replace("_", " ")

        def noted(x: Tensor, *_: Any) -> Tensor:
            self.notes.append(words)
            return x[:, : x.size(1) // 2] if name == "swiglu" else torch.empty_like(x)

        return noted


class NotedView:
    """The view of a step of shape `dims` that notes what layers ask of it; `channels` are those of
    the recurrent layer that runs."""

    dummy_place = 0
    routing = None
    channels = 0

    def __init__(self, config: Any, dims: BatchDimensions, ops: NotedOps) -> None:
        self.dims, self._config, self._ops = dims, config, ops
        self.step = self
        self.write_index = torch.empty(dims.tokens, dtype=torch.int64, device="meta")
        self.may_gate = dims.is_decode_only and dims.width == 1
        self._rotated = 2 * len(described_frequencies(config))
        self._others = other_tables(config, 1, torch.device("cpu"))

    def qkv_places(self, layer: int) -> QkvPlaces | None:
        """Places of the qkv product, where heads are rotated as a whole."""
        dim, heads = self._config.kv_channels, self._config.num_query_groups
        if self._rotated_of(layer) != dim:
            return None
        table = torch.empty((1, dim), device="meta")
        cache = torch.empty((1, 1, heads, dim), dtype=self._config.params_dtype, device="meta")
        return QkvPlaces(table, table, self.write_index, self.write_index, cache, cache)

    def _rotated_of(self, layer: int) -> int:
        other = self._others.get(layer)
        return self._rotated if other is None else other.cos.size(1)

    def may_round(self, layer: int) -> bool:
        """Whether attention rounds its rows."""
        return self.dims.is_decode_only and self._config.kv_channels == BLOCK

    def attend(
        self, layer: int, query: Tensor, scale: Any = None, sinks: Any = None, rounded: Any = None
    ) -> Tensor:
        """Attention of rotated queries."""
        self._ops.notes.append("attention" if rounded is None else "attention + rounding")
        return query

    def attention(
        self, layer: int, mixed_qkv: Tensor, q_norm: Any, k_norm: Any, scale: Any, has_gate: bool,
        sinks: Any, rounded: Any = None,
    ) -> Tensor:  # fmt: skip
        """q/k norms, rope, append and attention."""
        norms = "q/k norms + " if q_norm is not None else ""
        self._ops.notes.append(f"{norms}{'rope + ' if self._rotated_of(layer) else ''}append")
        heads, dim = self._config.num_attention_heads, self._config.kv_channels
        query = mixed_qkv.new_empty((len(mixed_qkv), heads, dim))
        attended = self.attend(layer, query, rounded=rounded)
        if has_gate:
            self._ops.notes.append("output gate")
        return attended

    def recurrent(self, layer: int, projected: Tensor, params: Any) -> Tensor:
        """Convolution and recurrence of a layer."""
        self._ops.notes.append("convolution + recurrence")
        return projected.new_empty((len(projected), self.channels))

    def recurrent_gated(
        self, layer: int, projected: Tensor, params: Any, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`recurrent`, gated."""
        y = self.recurrent(layer, projected, params)
        self._ops.notes[-1] += " + gate"
        return y, y.new_empty((len(y), 1, 1), dtype=torch.float32)


@torch.no_grad()
def layer_program(
    model: Any, dims: BatchDimensions, major: int, is_invariant: bool = False
) -> list[str]:
    """What each layer of a model launches in a step of shape `dims`, and the end of the step: a
    line each. `model`: from `build_model` on the meta device, of one rank; `major`: compute
    capability of the GPU whose rules count; 0: a CPU; `is_invariant`: as of `Ops`.

    Raises:
        ConfigurationError: with `is_invariant`, a layer that has no such kernel.
    """
    if is_invariant:
        check_invariant_layers(model, major)
    names = {
        id(module.weight): name.rpartition(".")[2].removeprefix("linear_")
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    }
    is_tied = model.share_embeddings_and_output_weights
    output = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
    names[id(output)] = "logits"
    fold_norms(model)
    stamp_kv_layers(model)
    ops, lines, stack = NotedOps(major, names, is_invariant), list[str](), model.decoder
    bind_ops(model, ops)  # type: ignore[arg-type]
    view = NotedView(model.config, dims, ops)
    hidden, dtype = model.config.hidden_size, model.config.params_dtype
    stream = Stream(torch.empty((dims.tokens, hidden), dtype=dtype, device="meta"))
    for number, kind in enumerate(stack.layer_type_list):
        layer, ops.notes = stack.layers[number], []
        sizes = getattr(LAYER_KINDS[kind].block(layer), "sizes", None)
        view.channels = getattr(sizes, "channels", 0)
        stream = LAYER_KINDS[kind](layer, stream, view, True)
        lines.append(f"layer {number}: {', '.join(ops.notes)}")
    ops.notes = []
    normed = stack.finish(stream)[0][: dims.sample_rows, None]
    model.output_layer(normed, weight=output)
    lines.append(f"end: {', '.join(ops.notes)}")
    return lines
