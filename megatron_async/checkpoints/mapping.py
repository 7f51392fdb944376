"""The names of a model's weights, in every format: one two-way table, made layer by layer.

| format | names |
| --- | --- |
| model | parameters of our `HybridModel`: layer i is character i of the pattern |
| Hugging Face, GGUF | the family's (`checkpoints/family_names.py`), also its layers |
| Megatron checkpoint | as the model, but a norm bears the name of the linear layer after it |
| Megatron checkpoint of a `GPTModel` | the family's layers, or all stacked in one tensor |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_async.checkpoints.family_names import FamilyNames, mtp_names_of, names_of
from megatron_async.checkpoints.weight import Region, Rows, Shape, Shard, Strip, Weight
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.pipeline import EMBEDDING, OUTPUT
from megatron_async.models.sizes import CONV_KERNEL, MambaSizes, RecurrentSizes


@dataclass(frozen=True)
class Layer:
    """One layer of a pattern, and how its weights are made."""

    a: ModelArchitecture
    names: FamilyNames
    ours: str
    """Prefix of its parameters."""
    theirs: str
    """Prefix of its Hugging Face tensors."""

    def weight(
        self,
        name: str,
        parts: Mapping[str, Shape],
        dim: int | None = None,
        groups: int = 1,
        stored: str = "",
        strips: dict[str, int] | None = None,
    ) -> Weight:
        """A weight, its names without the layer's prefixes; ranks share all its strips."""
        return Weight(
            self.ours + name,
            {self.theirs + part: shape for part, shape in parts.items()},
            groups,
            self.ours + (stored or name),
            dim,
            strips=tuple(Strip(strip, rows) for strip, rows in (strips or {}).items()),
        )

    def gate_up(self, name: str, parts: tuple[str, ...], ffn: int) -> Weight:
        """First matrix of an MLP of `ffn` units: [gate; up], or up alone."""
        gated = self.a.is_gated
        if gated and len(parts) == 1:
            joint = {parts[0]: (2 * ffn, self.a.hidden_size)}
            return self.weight(name, joint, 0, strips={"gate": ffn, "up": ffn})
        return self.weight(name, dict.fromkeys(parts, (ffn, self.a.hidden_size)), 0)

    def part(self, prefix: str, name: str) -> str:
        """The tensor of an attention or Mamba-2 mixer that Hugging Face calls `name`."""
        return prefix + self.names.renamed.get(name, name)

    def bias_of(self, weight: Weight) -> Weight:
        """The bias of a weight of whole parts."""
        end = len("weight")
        parts = {f"{name[:-end]}bias": shape[:1] for name, shape in weight.parts.items()}
        dim = 0 if weight.partition_dim == 0 else None
        name, stored = (f"{each[:-end]}bias" for each in (weight.name, weight.stored))
        return replace(weight, name=name, stored=stored, parts=parts, partition_dim=dim)

    def first(self, weight: Weight) -> Iterator[Weight]:
        """The first matrix of an MLP, and its bias."""
        yield weight
        if self.a.add_bias_linear:
            yield self.bias_of(weight)

    def last(self, weight: Weight) -> Iterator[Weight]:
        """The last matrix of a layer, and its bias, whose sum goes into the residual stream."""
        yield from map(self.into_residual, self.first(weight))

    def into_residual(self, weight: Weight) -> Weight:
        """The last matrix of a layer, whose product goes into the residual stream."""
        return replace(weight, scale=self.a.residual_multiplier)


def _attention(layer: Layer) -> Iterator[Weight]:
    a, theirs = layer.a, layer.names.attention
    linear, hidden = "self_attention.linear_", a.hidden_size
    q, kv = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    rows = {"q": q, "k": kv, "v": kv}
    yield layer.weight(
        "input_layernorm.weight",
        {layer.names.mixer_norm: (hidden,)},
        stored=linear + "qkv.layer_norm_weight",
    )
    proj = {layer.part(theirs, "o_proj.weight"): (hidden, q)}
    yield from layer.last(layer.weight(linear + "proj.weight", proj, 1))
    has_bias = a.add_qkv_bias or a.add_bias_linear
    for name, rest in (("weight", (hidden,)), *([("bias", ())] if has_bias else [])):
        parts = {layer.part(theirs, f"{p}_proj.{name}"): (n, *rest) for p, n in rows.items()}
        weight = layer.weight(f"{linear}qkv.{name}", parts, 0, a.num_query_groups)
        yield _with_gates(weight, a) if a.attention_output_gate else weight
    if a.qk_layernorm:
        for part in "qk":
            yield layer.weight(
                f"self_attention.{part}_layernorm.weight",
                {f"{theirs}{part}_norm.weight": (a.kv_channels,)},
            )
    if a.has_post_norms:
        norm = {layer.names.post_norms[0]: (hidden,)}
        yield layer.weight("self_attention.post_layernorm.weight", norm)
    if a.softmax_type == "learnable":
        name, sinks = "self_attention.core_attention.softmax_offset", theirs + layer.names.sinks
        weight = layer.weight(name, {sinks: (a.num_attention_heads,)}, 0)
        yield replace(weight, is_float32=True)


def _with_gates(weight: Weight, a: ModelArchitecture) -> Weight:
    """`linear_qkv` with gates: Hugging Face has each query head's gate after the head, Megatron the
    gates of a KV head's query heads after all these heads."""
    q = next(iter(weight.parts))
    queries, *rest = weight.parts[q]
    dim, group = a.kv_channels, a.num_attention_heads // a.num_query_groups
    order: list[Rows] = []
    for kv_head in range(a.num_query_groups):
        heads = range(kv_head * group, (kv_head + 1) * group)
        order += [Rows(0, 2 * head * dim, dim) for head in heads]
        order += [Rows(0, (2 * head + 1) * dim, dim) for head in heads]
        order += [Rows(part, kv_head * dim, dim) for part in (1, 2)]
    total = sum(rows.count for rows in order)
    return replace(
        weight,
        parts=weight.parts | {q: (2 * queries, *rest)},
        groups=1,
        strips=(Strip("qkv", total),),
        order=tuple(order),
    )


def _mlp(layer: Layer) -> Iterator[Weight]:
    a, names = layer.a, layer.names
    fc1, fc2 = "mlp.linear_fc1.", "mlp.linear_fc2."
    yield layer.weight(
        "pre_mlp_layernorm.weight",
        {names.ffn_norm: (a.hidden_size,)},
        stored=fc1 + "layer_norm_weight",
    )
    yield from layer.first(layer.gate_up(fc1 + "weight", names.gate_up, a.ffn_hidden_size))
    down = {names.down: (a.hidden_size, a.ffn_hidden_size)}
    yield from layer.last(layer.weight(fc2 + "weight", down, 1))
    if a.has_post_norms:
        yield layer.weight("mlp.post_layernorm.weight", {names.post_norms[1]: (a.hidden_size,)})


def _moe(layer: Layer) -> Iterator[Weight]:
    a, names = layer.a, layer.names
    hidden, experts = a.hidden_size, a.num_moe_experts
    yield layer.weight("pre_mlp_layernorm.weight", {names.ffn_norm: (hidden,)})
    yield layer.weight("mlp.router.weight", {names.router: (experts, hidden)})
    if a.add_bias_linear:
        yield layer.weight("mlp.router.bias", {names.router_bias: (experts,)})
    if a.moe_router_enable_expert_bias:
        bias = layer.weight("mlp.router.expert_bias", {names.expert_bias: (experts,)})
        yield replace(bias, is_float32=True)
    yield _experts(layer, "fc1", names.expert_gate_up, 0)
    yield layer.into_residual(_experts(layer, "fc2", (names.expert_down,), 1))
    if a.add_bias_linear:
        for name, part, dim in zip(("fc1", "fc2"), names.expert_biases, (0, None), strict=True):
            rows = (1 + a.is_gated) * a.moe_ffn_hidden_size if dim == 0 else hidden
            bias = _of_experts(layer, f"{name}.bias", {part: (experts, rows)}, dim)
            yield bias if dim == 0 else layer.into_residual(bias)
    shared = a.moe_shared_expert_intermediate_size
    if shared:
        prefix = "mlp.shared_experts.linear_"
        yield layer.gate_up(prefix + "fc1.weight", names.shared_gate_up, shared)
        down = {names.shared_down: (hidden, shared)}
        yield layer.into_residual(layer.weight(prefix + "fc2.weight", down, 1))
    if a.moe_shared_expert_gate:
        yield layer.weight("mlp.shared_experts.gate_weight", {names.shared_gate: (1, hidden)})


def _experts(layer: Layer, name: str, parts: tuple[str, ...], dim: int) -> Weight:
    """A matrix of all experts: fc1, whose rows ranks share, or fc2, whose columns."""
    a = layer.a
    ffn, gated = a.moe_ffn_hidden_size, a.is_gated
    shape = (ffn, a.hidden_size) if dim == 0 else (a.hidden_size, ffn)
    order: tuple[Rows, ...] = ()
    named: dict[str, Shape]
    if "{e}" in parts[0]:
        every = range(a.num_moe_experts)
        named = {part.format(e=expert): shape for expert in every for part in parts}
    else:
        rows = (1 + (gated and dim == 0)) * shape[0] // len(parts)
        named = dict.fromkeys(parts, (a.num_moe_experts, rows, shape[1]))
        if len(parts) > 1:
            order = tuple(Rows(part, 0, rows) for part in range(len(parts)))
    return replace(_of_experts(layer, f"{name}.weight", named, dim), order=order)


def _of_experts(layer: Layer, name: str, parts: dict[str, Shape], dim: int | None) -> Weight:
    """A parameter of all experts, `[experts, rows, columns]`, or `[experts, rows]` of a bias."""
    a, strips = layer.a, dict[str, int]()
    is_stacked = len(next(iter(parts.values()))) == (2 if name.endswith("bias") else 3)
    if dim == 0 and is_stacked:
        strips = dict.fromkeys(("gate", "up") if a.is_gated else ("up",), a.moe_ffn_hidden_size)
    weight = layer.weight(
        f"mlp.experts.linear_{name}",
        parts,
        dim,
        stored=f"mlp.experts.experts.linear_{name}",
        strips=strips,
    )
    alternates = len(strips) > 1 and layer.names.alternates
    return replace(weight, experts=a.num_moe_experts, alternates=alternates)


def _recurrent(
    layer: Layer, ours: str, theirs: str, sizes: RecurrentSizes, inside: Iterable[Weight]
) -> Iterator[Weight]:
    """A mixer with a state: the norm before it, numbers of each head, what is its own, and the last
    product."""
    hidden, heads = layer.a.hidden_size, sizes.state_shape[0]
    has_skip = isinstance(sizes, MambaSizes)
    norm, float32 = "norm" if has_skip else "input_layernorm", ["A_log", *["D"] * has_skip]
    before = {layer.names.mixer_norm: (hidden,)}
    yield layer.weight(f"{norm}.weight", before, stored=ours + "in_proj.layer_norm_weight")
    for name in ("dt_bias", *float32):
        weight = layer.weight(ours + name, {layer.part(theirs, name): (heads,)}, 0)
        yield replace(weight, is_float32=name in float32)
    yield from inside
    last = {layer.part(theirs, "out_proj.weight"): (hidden, sizes.channels)}
    yield layer.into_residual(layer.weight(ours + "out_proj.weight", last, 1))


def _mamba(layer: Layer) -> Iterator[Weight]:
    theirs, sizes, hidden = layer.names.mamba, layer.a.mamba, layer.a.hidden_size

    def striped(name: str, part: str, rows: dict[str, int], *rest: int) -> Weight:
        """Split strip by strip; the B and C of a single group are on every rank."""
        shape = (sum(rows.values()), *rest)
        weight = layer.weight(name, {layer.part(theirs, part): shape}, 0, stored=f"mixer.{part}")
        strips = tuple(
            Strip(strip, n, strip not in "BC" or sizes.groups > 1) for strip, n in rows.items()
        )
        return replace(weight, strips=strips, is_stored_in_strips=True)

    conv = sizes.conv_strips
    inside = (
        striped("mixer.conv1d_weight", "conv1d.weight", conv, 1, CONV_KERNEL),
        striped("mixer.conv1d_bias", "conv1d.bias", conv),
        striped("mixer.in_proj.weight", "in_proj.weight", sizes.strips, hidden),
        layer.weight("mixer.norm.weight", {theirs + "norm.weight": (sizes.channels,)}, 0),
    )
    return _recurrent(layer, "mixer.", theirs, sizes, inside)


def _delta(layer: Layer) -> Iterator[Weight]:
    a, theirs, sizes = layer.a, layer.names.delta, layer.a.delta
    ours, order = "self_attention.", _delta_order(layer)
    parts = {
        theirs + name: (sum(rows.count for rows in order if rows.part == part), a.hidden_size)
        for part, name in enumerate(layer.names.delta_in_proj)
    }
    kernel = {theirs + "conv1d.weight": (sizes.conv, 1, CONV_KERNEL)}
    in_proj = layer.weight(ours + "in_proj.weight", parts, 0, strips=sizes.strips)
    conv = layer.weight(ours + "conv1d.weight", kernel, 0, strips=sizes.conv_strips)
    norm = layer.weight(ours + "out_norm.weight", {theirs + "norm.weight": (sizes.value_dim,)})
    # The one norm of these families whose factor transformers stores itself.
    offset = -1.0 if a.layernorm_zero_centered_gamma else 0.0
    inside = (
        replace(in_proj, order=order, is_stored_in_strips=True),
        replace(conv, is_stored_in_strips=True),
        replace(norm, is_float32=True, offset=offset),
    )
    return _recurrent(layer, ours, theirs, sizes, inside)


def _delta_order(layer: Layer) -> tuple[Rows, ...]:
    """Where the rows of `in_proj` are: query, key, value, z, beta, alpha."""
    counts, heads = list(layer.a.delta.strips.values()), layer.a.delta.key_heads
    if len(layer.names.delta_in_proj) == 4:
        whole = enumerate((sum(counts[:3]), *counts[3:]))
        return tuple(Rows(part, 0, count) for part, count in whole)
    order = []
    for part, strips in enumerate((counts[:4], counts[4:])):
        each, first = sum(strips) // heads, 0
        for count in strips:
            share = count // heads
            order += [Rows(part, head * each + first, share) for head in range(heads)]
            first += share
    return tuple(order)


WEIGHTS_OF: dict[str, Callable[[Layer], Iterator[Weight]]] = {
    "*": _attention,
    "-": _mlp,
    "E": _moe,
    "M": _mamba,
    "G": _delta,
}
"""Weights of a layer, by its kind."""


__all__ = ["Region", "Shape", "Shard", "Weight", "mtp_weights", "weights"]


def weights(
    architecture: ModelArchitecture,
    shard: Shard | None = None,
    stacked_experts: bool = False,
    stacked_mtp: bool = False,
    names: FamilyNames | None = None,
) -> Iterator[Weight]:
    """Every parameter of a rank's `HybridModel`, in the order of the model; those of multi-token
    prediction where the rank holds them.

    Where embedding and output layer are tied, the last of several pipeline stages has a copy of the
    embedding in its output layer.

    Args:
        architecture: of the whole model.
        shard: what this rank holds; None: all.
        stacked_experts, stacked_mtp: Hugging Face's names (of MTP) are those of transformers'
            modules, where a tensor holds all experts, not those of published files.
        names: of tensors, where they are not Hugging Face's, but for those of MTP.
    """
    shard = shard or Shard()
    names = names or names_of(architecture.model_type, stacked_experts, architecture.is_gated)
    for weight in _whole_weights(architecture, names):
        name = shard.local_name(weight.name)
        if name is not None:
            yield replace(weight, name=name, shard=shard)
    stage = shard.stage
    if stage is not None and stage.is_last and architecture.tie_word_embeddings:
        embedding = next(_whole_weights(architecture, names))
        yield replace(embedding, name=OUTPUT, shard=shard)
    if shard.with_mtp:
        for weight in mtp_weights(architecture, stacked_mtp):
            yield replace(weight, shard=shard)


def _whole_weights(a: ModelArchitecture, names: FamilyNames) -> Iterator[Weight]:
    def plain(name: str, huggingface: str, shape: Shape, dim: int | None) -> Weight:
        return Weight(name, {huggingface: shape}, 1, name, dim)

    embedding = (a.vocab_size, a.hidden_size)
    yield plain(EMBEDDING, names.embedding, embedding, 0)
    for number, kind in enumerate(a.pattern):
        block = number // a.layers_per_block
        layer = Layer(a, names, f"decoder.layers.{number}.", names.layer.format(block))
        yield from WEIGHTS_OF[kind](layer)
    yield plain("decoder.final_norm.weight", names.final_norm, (a.hidden_size,), None)
    if not a.tie_word_embeddings:
        yield plain(OUTPUT, names.output, embedding, 0)


def mtp_weights(a: ModelArchitecture, stacked: bool = False) -> Iterator[Weight]:
    """Every parameter of all depths of multi-token prediction, for one rank; `stacked` as for
    `weights`."""
    names, mtp = names_of(a.model_type, stacked, a.is_gated), mtp_names_of(a.model_type)
    hidden, layers = a.hidden_size, len(a.mtp_pattern)
    for depth in range(a.mtp_num_depths):
        first = depth * layers
        numbers = {"depth": depth, "first": first, "last": first + layers - 1}
        ours = f"mtp.layers.{depth}."
        whole = Layer(a, names, ours, "")
        for norm in ("enorm", "hnorm", "final_layernorm"):
            theirs: str = getattr(mtp, norm)
            yield whole.weight(f"{norm}.weight", {theirs.format(**numbers): (hidden,)})
        joint = {mtp.eh_proj.format(**numbers): (hidden, 2 * hidden)}
        eh_proj = whole.weight("eh_proj.weight", joint, 0)
        yield replace(eh_proj, has_swapped_halves=mtp.is_hidden_first)
        for number, kind in enumerate(a.mtp_pattern):
            inside = f"{ours}mtp_model_layer.layers.{number}."
            theirs = mtp.inside.format(layer=first + number, **numbers)
            yield from WEIGHTS_OF[kind](Layer(a, names, inside, theirs))
