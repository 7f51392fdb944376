"""An expert layer of a few tokens in three launches: routing, experts and shared expert together.

In a decode step of few requests, launches take as long as the reads of the weights. The grouped
products (`ops/experts/expert_mlp.py`) need ten launches for such a layer; this module needs three:

1. residual add, RMSNorm, and the logits of all experts (`ops/experts/few_token_kernels.py`);
2. the choice, and the first product of the chosen experts and of the shared one;
3. their second product, each token's experts added up in order, the shared one last
   (`ops/experts/few_token_kernels.py`).

Nothing is sorted: with so few tokens two rarely share an expert, so each (token, expert) pair is
computed separately, as weight rows times a vector, on the CUDA cores, where all loads of a thread
may be in flight. Sums are float32 in a fixed order, and only the activated rows between the
products are rounded, so results are the same in every run. They are not those among many tokens:
`few_token_chains.py` is for the promise "invariant".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.experts.expert_mlp import expert_mlp
from megatron_async.ops.experts.expert_plan import (
    FEW_TOKENS_MAJOR,
    MOST_FEW_TOKENS,
    UP_REGISTERS,
    ChainPlan,
    FewTokenPlan,
    LayerShape,
    plan_few_chains,
    plan_few_tokens,
)
from megatron_async.ops.experts.expert_routing import Routing, route
from megatron_async.ops.experts.few_token_kernels import (
    few_down_kernel,
    few_up_kernel,
    norm_logits_kernel,
)
from megatron_async.ops.linear.activations import SWIGLU, Gating, squared_relu, swiglu
from megatron_async.ops.linear.load_tile import kept_operands, may_be_loaded
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight, widened
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.row_tiles import TILE_BYTES
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.op import op


@dataclass(frozen=True)
class ExpertLayer:
    """Weights of a layer whose experts are all here, one dtype, each contiguous, and its router's
    rule.

    Attributes:
        router: `[experts, hidden]`.
        fc1: `[experts, 2 * ffn, hidden]`, [gate; up] of SwiGLU, or `[experts, ffn, hidden]`, whose
            products are squared where they are positive.
        fc2: `[experts, hidden, ffn]`.
        topk, pre_softmax, sigmoid, bias, scale, logit_bias: as for
            `ops.experts.expert_routing.route`.
        shared_fc1: `[2 * shared_ffn, hidden]`, or `[shared_ffn, hidden]` without a gate; None: no
            expert is shared.
        shared_fc2: `[hidden, shared_ffn]`.
        shared_gate: `[1, hidden]`: how much of the shared expert counts is the sigmoid of its
            product with the token; None: all.
        bias1, bias2, gating: as for `ops.experts.expert_mlp.expert_mlp`; the shared expert has no
            biases.
    """

    router: Tensor
    fc1: Tensor | QuantisedWeight
    fc2: Tensor | QuantisedWeight
    topk: int
    pre_softmax: bool = False
    sigmoid: bool = False
    bias: Tensor | None = None
    scale: float = 1.0
    shared_fc1: Tensor | QuantisedWeight | None = None
    shared_fc2: Tensor | QuantisedWeight | None = None
    shared_gate: Tensor | None = None
    logit_bias: Tensor | None = None
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    gating: Gating = SWIGLU

    @property
    def has_biases(self) -> bool:
        """Whether a product has a bias."""
        return any(each is not None for each in (self.logit_bias, self.bias1, self.bias2))

    @property
    def shape(self) -> LayerShape:
        """Sizes by which the layer is planned."""
        experts, hidden, ffn = self.fc2.shape
        return LayerShape(
            experts=experts,
            topk=self.topk,
            hidden=hidden,
            ffn=ffn,
            shared_ffn=0 if self.shared_fc2 is None else self.shared_fc2.size(1),
            gated=self.fc1.size(1) != ffn,
            itemsize=kept_operands(self.fc1)[0].itemsize,
        )

    @property
    def form(self) -> Form | None:
        """How the weights of both products are kept; None: in their dtype.

        Raises:
            ValueError: some are kept so, and some not.
        """
        weights = self.fc1, self.fc2, self.shared_fc1, self.shared_fc2
        forms = {
            each.form if isinstance(each, QuantisedWeight) else None
            for each in weights
            if each is not None
        }
        if len(forms) > 1:
            raise ValueError("few_token_experts: all weights must be kept in one form.")
        return forms.pop()


def find_plan(
    x: Tensor, layer: ExpertLayer, major: int, is_invariant: bool = False
) -> FewTokenPlan | ChainPlan | None:
    """`plan_few_tokens` for x, `[..., tokens, hidden]`, or `plan_few_chains` if `is_invariant`;
    None also where nothing was measured: on a GPU of another compute capability (`major`), and on a
    CPU (0). A softmax over all experts is a sum over threads, which follows the kernel's warps, so
    there is none for it if `is_invariant`, nor for biases. Of
    quantised weights there are plans for FP8 alone, all in one form, and none if `is_invariant`."""
    if major != FEW_TOKENS_MAJOR or (is_invariant and (layer.pre_softmax or layer.has_biases)):
        return None
    weights = layer.fc1, layer.fc2, layer.shared_fc1, layer.shared_fc2
    if any(isinstance(weight, QuantisedWeight) for weight in weights) and (
        is_invariant or not _is_known(layer)
    ):
        return None
    plan = plan_few_chains if is_invariant else plan_few_tokens
    return plan(x.size(-2), layer.shape)


def _is_known(layer: ExpertLayer) -> bool:
    """Whether the kernels for a few tokens know the form of a layer's weights."""
    try:
        form = layer.form
    except ValueError:
        return False
    if form is None or form.numbers != "FP8" or form.has_outer:
        return False
    return may_be_loaded(form, layer.fc1.dtype)


@op(gpu="experts.few_token_chains")
def few_token_experts(
    x: Tensor | Stream,
    layer: ExpertLayer,
    plan: FewTokenPlan | ChainPlan | None,
    places: Tensor | None = None,
    dummy_place: int = 0,
    added: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """For each token the weighted sum of its experts, and the shared expert.

    Args:
        x: `[tokens, hidden]` on a GPU; rows may be strided, elements not. Or tokens whose residual
            add and norm are to be done first; their `value` may be partial sums, as for
            `add_rms_norm`.
        layer: weights, and how experts are chosen.
        plan: from `find_plan`; the reference reads none.
        places, dummy_place: which tokens go to no expert, as for `route`. The shared expert meets
            all.
        added: `[tokens, hidden]`, elements of a row adjacent: added to the rounded result.

    Returns:
        `[tokens, hidden]`, and the routing, written on the device by the time of the sum.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or there are too many tokens.
    """
    if added is not None:
        out, routing = few_token_experts.reference(x, layer, plan, places, dummy_place)
        return out + added, routing
    check_few_tokens(x, layer)
    if isinstance(x, Stream):
        normed, x.total = add_rms_norm.reference(*x.norm_arguments)
        x = normed
    rule = layer.pre_softmax, places, dummy_place, layer.sigmoid, layer.bias, layer.scale
    routing = route.reference(x, layer.router, layer.topk, *rule, layer.logit_bias)
    weights = layer.fc1, layer.fc2, 0, layer.fc1.size(0), layer.bias1, layer.bias2
    out = expert_mlp.reference(x, routing, *weights, layer.gating)
    if layer.shared_fc1 is None or layer.shared_fc2 is None:
        return out, routing
    fc1, fc2 = widened(layer.shared_fc1), widened(layer.shared_fc2)
    inner, gated = F.linear(x, fc1), layer.shape.gated
    inner = swiglu.reference(inner, layer.gating) if gated else squared_relu.reference(inner)
    shared = F.linear(inner, fc2).float()
    if layer.shared_gate is not None:
        shared = (x.float() @ layer.shared_gate.float().t()).sigmoid() * shared
    return (out.float() + shared).to(out.dtype), routing


@few_token_experts.gpu
def few_token_experts_gpu(
    x: Tensor | Stream,
    layer: ExpertLayer,
    plan: FewTokenPlan | ChainPlan | None,
    places: Tensor | None = None,
    dummy_place: int = 0,
    added: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    assert isinstance(plan, FewTokenPlan), "the caller asked find_plan"
    rows = x.value if isinstance(x, Stream) else x
    check_few_tokens(x, layer, added)
    shape = layer.shape
    tokens, hidden = rows.shape[-2:]
    dtype, device = layer.fc1.dtype, rows.device
    tiles = triton.cdiv(shape.experts, plan.block_experts)
    width = tiles * plan.block_experts + (layer.shared_gate is not None)
    logits = torch.empty((tokens, width), dtype=torch.float32, device=device)
    normed = _norm_and_logits(x, layer, plan, logits)
    routing, activated, shared = new_rows(layer, tokens)
    pairs = tokens * shape.topk
    block_k = TILE_BYTES // shape.itemsize
    shared_fc1 = layer.fc1 if layer.shared_fc1 is None else layer.shared_fc1
    shared_fc2 = layer.fc2 if layer.shared_fc2 is None else layer.shared_fc2
    up_programs = triton.cdiv(shape.ffn, plan.up_rows * plan.turns)
    shared_programs = triton.cdiv(shape.shared_ffn, plan.up_rows * plan.turns)
    few_up_kernel[(shared_programs * tokens + pairs * up_programs,)](
        normed,
        logits,
        routing.experts if places is None else places,
        logits if layer.bias is None else layer.bias,
        kept_operands(layer.fc1)[0],
        kept_operands(shared_fc1)[0],
        activated,
        shared,
        routing.experts,
        routing.weights,
        normed.stride(0),
        0 if places is None else len(places),
        dummy_place,
        float(layer.scale),
        layer.bias1,
        scales=_scales(layer.fc1, shared_fc1),
        form=layer.form,
        tokens=tokens,
        experts=shape.experts,
        topk=shape.topk,
        width=width,
        block_experts=max(32, triton.next_power_of_2(shape.experts)),
        hidden=hidden,
        ffn=shape.ffn,
        shared_ffn=shape.shared_ffn,
        block_n=plan.up_rows,
        block_k=block_k,
        depth=plan.up_depth,
        turns=plan.turns,
        gating=layer.gating if shape.gated else None,
        pre_softmax=layer.pre_softmax,
        sigmoid=layer.sigmoid,
        has_bias=layer.bias is not None,
        has_places=places is not None,
        num_warps=plan.warps,
        maxnreg=UP_REGISTERS,
        **launch_options(rows),
    )
    out = torch.empty((tokens, hidden), dtype=dtype, device=device)
    few_down_kernel[(triton.cdiv(hidden, plan.down_rows) * tokens,)](
        activated,
        shared,
        kept_operands(layer.fc2)[0],
        kept_operands(shared_fc2)[0],
        routing.experts,
        routing.weights,
        logits,
        out if added is None else added,
        out,
        0 if added is None else added.stride(0),
        layer.bias2,
        scales=_scales(layer.fc2, shared_fc2),
        form=layer.form,
        tokens=tokens,
        topk=shape.topk,
        width=width,
        hidden=hidden,
        ffn=shape.ffn,
        shared_ffn=shape.shared_ffn,
        units=triton.next_power_of_2(shape.units),
        block_n=plan.down_rows,
        block_k=block_k,
        depth=plan.down_depth,
        has_gate=layer.shared_gate is not None,
        has_added=added is not None,
        num_warps=plan.down_warps,
        **launch_options(rows),
    )
    return out, routing


def _scales(*weights: Tensor | QuantisedWeight) -> tuple[Tensor, ...] | None:
    """Scales of weights that have any."""
    kept = tuple(each.scales for each in weights if isinstance(each, QuantisedWeight))
    return kept or None


def _norm_and_logits(
    x: Tensor | Stream, layer: ExpertLayer, plan: FewTokenPlan, logits: Tensor
) -> Tensor:
    """The normed tokens; fills logits."""
    given = NormAndGate(x, layer)
    rows, block = given.rows, triton.next_power_of_2(given.rows.size(-1))
    experts = layer.router.size(0)
    tiles = triton.cdiv(experts, plan.block_experts) + given.constants["has_gate"]
    norm_logits_kernel[(tiles, rows.size(-2))](
        *given.tensors,
        logits,
        rows.stride(-2),
        rows.stride(0) if rows.dim() == 3 else 0,
        given.residual_stride,
        given.eps,
        layer.logit_bias,
        hidden=rows.size(-1),
        experts=experts,
        parts=rows.size(0) if rows.dim() == 3 else 1,
        block=block,
        block_experts=plan.block_experts,
        **given.constants,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(rows),
    )
    return given.normed


class NormAndGate:
    """Operands of a kernel that norms tokens, if x is a `Stream`, and routes them.

    Attributes:
        rows: `[tokens, hidden]`, or partial sums of them.
        normed: where to put the normed tokens, or the rows.
        tensors: rows, residual, the norm's weight, normed, total, the router and the shared
            expert's gate; another stands in for one that is missing.
        residual_stride, eps: of the residual's rows; of the norm.
        constants: which there are.
    """

    def __init__(self, x: Tensor | Stream, layer: ExpertLayer) -> None:
        norm, router, gate = x if isinstance(x, Stream) else None, layer.router, layer.shared_gate
        rows = x.value if isinstance(x, Stream) else x
        residual = None if norm is None else norm.residual
        normed = total = rows
        if norm is not None:
            normed = torch.empty(rows.shape[-2:], dtype=router.dtype, device=rows.device)
            norm.total = total = rows if residual is None else torch.empty_like(normed)
        self.rows, self.normed = rows, normed
        weight = router if norm is None or norm.weight is None else norm.weight
        before = rows if residual is None else residual
        self.tensors = rows, before, weight, normed, total, router, router if gate is None else gate
        self.residual_stride = 0 if residual is None else residual.stride(0)
        self.eps = 0.0 if norm is None else norm.eps
        self.constants = {
            "has_norm": norm is not None,
            "has_residual": residual is not None,
            "has_gate": gate is not None,
        }


def new_rows(layer: ExpertLayer, tokens: int) -> tuple[Routing, Tensor, Tensor]:
    """Where the first product puts its tokens' choices, and rows of experts and shared expert."""
    shape, dtype, device = layer.shape, layer.fc1.dtype, layer.fc1.device
    routing = Routing(
        torch.empty((tokens, shape.topk), dtype=torch.int32, device=device),
        torch.empty((tokens, shape.topk), dtype=torch.float32, device=device),
    )
    activated = torch.empty((tokens * shape.topk, shape.ffn), dtype=dtype, device=device)
    shared = torch.empty((tokens, max(shape.shared_ffn, 1)), dtype=dtype, device=device)
    return routing, activated, shared


def check_few_tokens(x: Tensor | Stream, layer: ExpertLayer, added: Tensor | None = None) -> None:
    """ValueError where arguments of `few_token_experts` do not fit."""
    _check_weights(layer)
    rows = x.value if isinstance(x, Stream) else x
    hidden, dtype = layer.fc2.size(1), layer.fc1.dtype
    if added is not None:
        fits = added.shape == rows.shape[-2:] and added.dtype == dtype and added.stride(1) == 1
        if not fits:
            raise ValueError(
                f"few_token_experts: what is added must be {tuple(rows.shape[-2:])} of {dtype}, "
                f"its rows adjacent elements; found {tuple(added.shape)}, {added.dtype}, strides "
                f"{added.stride()}."
            )
    parts = isinstance(x, Stream) and rows.dim() == 3
    if (rows.dim() != 2 and not parts) or rows.size(-1) != hidden or rows.stride(-1) != 1:
        raise ValueError(
            f"few_token_experts: x must be [tokens, {hidden}], its rows adjacent elements; found "
            f"{tuple(rows.shape)}, strides {rows.stride()}."
        )
    if not 0 < rows.size(-2) <= MOST_FEW_TOKENS:
        raise ValueError(
            f"few_token_experts: {rows.size(-2)} tokens, but it is for 1 to {MOST_FEW_TOKENS}: use "
            "expert_mlp."
        )
    if not isinstance(x, Stream):
        if rows.dtype != dtype:
            raise ValueError(f"few_token_experts: x is {rows.dtype}, but the weights are {dtype}.")
        return
    if parts and (x.residual is None or rows.dtype != torch.float32 or not rows.is_contiguous()):
        raise ValueError(
            "few_token_experts: partial sums must be float32, contiguous and have a residual; "
            f"found {rows.dtype}, strides {rows.stride()}, residual {x.residual is not None}."
        )
    if x.weight is None or x.weight.shape != (hidden,) or not x.weight.is_contiguous():
        raise ValueError(
            f"few_token_experts: the norm's weight must be ({hidden},), contiguous; found "
            f"{None if x.weight is None else (tuple(x.weight.shape), x.weight.stride())}."
        )
    stream = rows if x.residual is None else x.residual
    if stream.shape != rows.shape[-2:] or stream.dtype != dtype or stream.stride(1) != 1:
        raise ValueError(
            f"few_token_experts: the residual stream must be {tuple(rows.shape[-2:])} of {dtype}, "
            f"its rows adjacent elements; found {tuple(stream.shape)}, {stream.dtype}, strides "
            f"{stream.stride()}."
        )


def _check_weights(layer: ExpertLayer) -> None:
    shape = layer.shape
    halves = 2 if shape.gated else 1
    hidden, ffn, shared = shape.hidden, shape.ffn, shape.shared_ffn
    expected: dict[str, tuple[int, ...]] = {
        "router": (shape.experts, hidden),
        "fc1": (shape.experts, halves * ffn, hidden),
        "fc2": (shape.experts, hidden, ffn),
    }
    if shared:
        expected |= {"shared_fc1": (halves * shared, hidden), "shared_fc2": (hidden, shared)}
    if layer.shared_gate is not None:
        expected["shared_gate"] = (1, hidden)
    if layer.bias is not None:
        expected["bias"] = (shape.experts,)
    sizes = (shape.experts,), (shape.experts, halves * ffn), (shape.experts, hidden)
    for name, size in zip(("logit_bias", "bias1", "bias2"), sizes, strict=True):
        if getattr(layer, name) is not None:
            expected[name] = size
    for name, size in expected.items():
        weight: Tensor | QuantisedWeight | None = getattr(layer, name)
        dtype = torch.float32 if name == "bias" else layer.fc1.dtype
        fits = weight is not None and weight.shape == size and weight.dtype == dtype
        if weight is None or not fits or not weight.is_contiguous():
            found = None if weight is None else (tuple(weight.shape), weight.dtype)
            raise ValueError(
                f"few_token_experts: {name} must be {size} of {dtype}, contiguous; found {found}."
            )
    if layer.shared_gate is not None and not shared:
        raise ValueError("few_token_experts: a shared_gate is for a shared expert.")
    if layer.bias is not None and not layer.sigmoid:
        raise ValueError("few_token_experts: a bias is for sigmoid scores alone.")
    if not 0 < layer.topk <= shape.experts:
        raise ValueError(
            f"few_token_experts: topk={layer.topk} must be between 1 and {shape.experts} experts."
        )
