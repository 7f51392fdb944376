"""The forward of a decoder layer, from norm to norm: what `PagedHybridStack` runs for each layer.

A layer takes the residual stream and gives it to the next one. The additions and norms between two
layers belong to the stream, so that they become parts of the products beside them where these serve
that (`ops/linear/products.py`). Megatron's layers have their parts under different names; the table
at the end has the names of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_async.models.linear import InferenceColumnParallelLinear
from megatron_async.models.norm import factors_of, normalised, set_norm
from megatron_async.ops.linear.activations import SWIGLU, Gating
from megatron_async.ops.linear.product_kernel import Activation
from megatron_async.ops.linear.rounded_rows import RoundedRows
from megatron_async.ops.linear.stream import Stream

if TYPE_CHECKING:
    from megatron_async.models.step_view import StepView


def attention_layer(attention: Any, stream: Stream, view: StepView, may_split: bool) -> Stream:
    """Norm, qkv, rotary embedding and append; attention; projection and residual."""
    proj, has_gate = attention.linear_proj, attention.config.attention_output_gate
    is_ours = isinstance(attention.linear_qkv, InferenceColumnParallelLinear)
    if is_ours and proj.takes_rounded and view.may_round(attention.kv_layer_index) and not has_gate:
        rounded = proj.new_rounded(view.dims.tokens, stream)
        context = attended(attention, stream, view, rounded)
        return proj.add(Stream(context, rounded=rounded), stream, may_split)
    return proj.add(attended(attention, stream, view), stream, may_split)


def attended(
    attention: Any, stream: Stream, view: StepView, rounded: RoundedRows | None = None
) -> Tensor:
    """Attention of a stream, `[rows, heads * dim]`, before the projection; of `rounded` the codes.
    Of another linear layer than ours (TransformerEngine's) the stream has no norm left."""
    qkv, layer, config = attention.linear_qkv, attention.kv_layer_index, attention.config
    q_norm, k_norm = attention.q_layernorm, attention.k_layernorm
    scale, has_gate, places = config.softmax_scale, config.attention_output_gate, None
    if isinstance(qkv, InferenceColumnParallelLinear):
        dim = 0 if q_norm is not None or has_gate else attention.hidden_size_per_attention_head
        choice = qkv.choose(stream, rotate=dim)
        places = view.qkv_places(layer) if choice.met.rotate else None
        product = qkv.product(stream, choice, places)
    else:
        product = qkv(stream.value[:, None])[0].squeeze(1)
    sinks = attention.sinks
    if places is not None:
        return view.attend(layer, product, scale, sinks, rounded).flatten(1)
    q_factors = None if q_norm is None else factors_of(q_norm)
    k_factors = None if k_norm is None else factors_of(k_norm)
    # With sequence parallelism rows of padding stand behind the step's tokens.
    mixed = product[: view.dims.tokens]
    given = scale, has_gate, sinks, rounded
    return view.attention(layer, mixed, q_factors, k_factors, *given).flatten(1)


def mlp_layer(mlp: Any, stream: Stream, view: StepView, may_split: bool) -> Stream:
    """Norm, first product and activation; second product and residual."""
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    if isinstance(fc1, InferenceColumnParallelLinear) and fc2.takes_rounded:
        activation = activation_of(mlp.gating)
        choice = fc1.choose(stream, activation=activation, rounded=True)
        if choice.met.rounded:
            rounded = fc2.new_rounded(fc1.rows_of(stream), stream)
            rows = Stream(fc1.product(stream, choice, rounded=rounded), rounded=rounded)
            return fc2.add(rows, stream, may_split)
    return fc2.add(activated(mlp, stream), stream, may_split)


def activated(mlp: Any, stream: Stream) -> Tensor:
    """First product and activation of an MLP, `[rows, ffn]`; see `attended` about other layers."""
    fc1, activation = mlp.linear_fc1, activation_of(mlp.gating)
    if isinstance(fc1, InferenceColumnParallelLinear):
        choice = fc1.choose(stream, activation=activation)
        product = fc1.product(stream, choice)
        if choice.met.activation:
            return product
    else:
        wide, bias = fc1(stream.value[:, None])
        product = wide.squeeze(1) if bias is None else wide.squeeze(1) + bias
    if mlp.gating is None:
        return mlp.ops.squared_relu(product)
    return mlp.ops.swiglu(product) if activation else mlp.ops.swiglu(product, mlp.gating)


def activation_of(gating: Gating | None) -> Activation:
    """The activation of an MLP, as a product may have it behind it: with a gate (Shazeer 2020) or
    without (So et al. 2021); other units are ops of their own."""
    if gating is None:
        return "squared_relu"
    return "swiglu" if gating == SWIGLU else ""


def own_layer(block: Any, stream: Stream, view: StepView, may_split: bool) -> Stream:
    """A block that has its forward in its own file: `MoELayer`, a `RecurrentMixer`."""
    return block.run(stream, view, may_split)


@dataclass(frozen=True)
class LayerKind:
    """How a layer runs, and names of modules inside it.

    Attributes:
        norm_name, block_name: of the layer's norm, and of the module behind it.
        run: the block, of (block, stream, view, may_split): the stream behind it. Its output may be
            partial sums if `may_split`, for the next norm.
    """

    norm_name: str
    block_name: str
    run: Callable[[Any, Stream, Any, bool], Stream]

    def norm(self, layer: Any) -> nn.RMSNorm:
        """The norm of a layer of this kind."""
        norm: nn.RMSNorm = getattr(layer, self.norm_name)
        return norm

    def block(self, layer: Any) -> Any:
        """The block after the norm."""
        return getattr(layer, self.block_name)

    def __call__(self, layer: Any, stream: Stream, view: Any, may_split: bool) -> Stream:
        """The stream behind a layer of this kind."""
        set_norm(stream, self.norm(layer))
        block = self.block(layer)
        norm = getattr(block, "post_layernorm", None)
        if norm is None:
            return self.run(block, stream, view, may_split)
        stream.is_apart = True
        behind = self.run(block, stream, view, False)
        return Stream(normalised(block.ops, Stream(behind.value), norm)[0], behind.residual)


LAYER_KINDS = {
    "*": LayerKind("input_layernorm", "self_attention", attention_layer),
    "-": LayerKind("pre_mlp_layernorm", "mlp", mlp_layer),
    "E": LayerKind("pre_mlp_layernorm", "mlp", own_layer),
    "M": LayerKind("norm", "mixer", own_layer),
    "G": LayerKind("input_layernorm", "self_attention", own_layer),
}
"""By the character of Megatron's layer pattern."""
