"""Matrix products of decode steps: few rows, in the time of reading the weights.

cuBLAS does not use programmatic dependent launch, so memory idles before and after each of its
kernels. The kernels of the table below load their first weights early, small products all weights,
and include operations around the product (`Wants`).

A product is chosen once: `choose` gives the first kernel of the table that has a plan, with the
wants that it serves. The answer is kept, so it costs a step nothing. A new kernel is a file with
its plan, rule, launch and rounding, and a row in the table.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.linear.activations import squared_relu, swiglu
from megatron_async.ops.linear.cublas_lt import CUBLAS_LT
from megatron_async.ops.linear.long_row import LONG_ROW_KERNEL
from megatron_async.ops.linear.one_row import ONE_ROW
from megatron_async.ops.linear.product_kernel import (
    IN_ORDER,
    Problem,
    ProductKernel,
    Rounding,
    Wants,
    may_be_copied,
)
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight
from megatron_async.ops.linear.resident import RESIDENT
from megatron_async.ops.linear.rms_norm import add_rms_norm, add_rms_norm_gpu
from megatron_async.ops.linear.rounded_rows import RoundedRows
from megatron_async.ops.linear.scaled_products import SCALED
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.streamed import STREAMED
from megatron_async.ops.linear.streamed_fp8 import SPLIT_ROWS, STREAMED_FP8
from megatron_async.ops.linear.tile import TILE
from megatron_async.ops.linear.warpgroup import WARPGROUP
from megatron_async.ops.linear.widen import widen
from megatron_async.ops.op import op, promising

MEASURED_MAJOR = 9
"""Compute capability of the devices that the rules were measured on (Hopper); others keep
cuBLAS."""


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return F.linear(x, weight, bias)


CUBLAS = ProductKernel(
    "cuBLAS",
    lambda _problem: None,
    lambda _problem, _wants, _plan: set(),
    _cublas,
    Rounding("cuBLAS's", "rows"),
)
TORCH = replace(CUBLAS, name="torch")
"""What multiplies on a CPU."""


def _widened(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, *_: Any) -> Tensor:
    return F.linear(weight.rounded(x).to(x.dtype), widen(weight), bias)


WIDENED = replace(CUBLAS, name="widened, then cuBLAS", launch=_widened)
"""What multiplies by a quantised weight where no kernel does."""
PRODUCTS = (CUBLAS_LT, RESIDENT, WARPGROUP, STREAMED, LONG_ROW_KERNEL, ONE_ROW, TILE)
"""In the order in which they are asked. Where none has a plan, cuBLAS multiplies."""
INVARIANT = tuple(kernel for kernel in PRODUCTS if kernel.rounding.order == IN_ORDER.order)
"""The kernels that are asked with `Wants.invariant`, and then never split."""
QUANTISED: tuple[ProductKernel, ...] = (STREAMED_FP8, SCALED, TILE)
"""Kernels that are asked where the weight has a `Form`: they know formats, and `WIDENED` all."""


class WeightShape(NamedTuple):
    """What a choice depends on of a weight `[outputs, k]`.

    Attributes:
        major: compute capability of the GPU.
        aligned: whether rows of weight and input begin at multiples of 16 bytes.
        form: of a quantised weight.
    """

    outputs: int
    k: int
    dtype: torch.dtype
    major: int = MEASURED_MAJOR
    aligned: bool = True
    form: Form | None = None


class Choice(NamedTuple):
    """How a product is computed.

    Attributes:
        kernel: of the table, or `CUBLAS`.
        plan: its layout; None of cuBLAS.
        met: the wants that it serves. All others are kernels of their own.
    """

    kernel: ProductKernel
    plan: Any
    met: Wants


WITHOUT_WANTS = Choice(TORCH, None, Wants(0))
"""What a CPU gets, and a weight that is not contiguous: torch's product, and nothing with it."""


@lru_cache(maxsize=4096)
def choose(weight: WeightShape, wants: Wants) -> Choice:
    """The kernel for a product, and which wants it serves.

    No kernel is passed over for a want: the kernel is the one that multiplies fastest, and a want
    that it does not serve is dropped, to become a kernel of its own, in this order:

    0. with `invariant`: all that changes a rounding, or that some of the kernels do not serve; that
       leaves the bias, and the activation where the kernel can round before it;
    1. with a bias: the activation, partial sums, and the sum with the residual stream;
    2. with an activation, or heads that are rotated: partial sums;
    3. without an activation that is met: rounding of its rows;
    4. of float16 (it would overflow before it is divided) and of several groups: squares;
    5. of several rows: the sum with the residual stream;
    6. what is not `ProductKernel.served`, each for itself: norm, squares, rotation, residual,
       activation, and, as no kernel serves it yet, an adapter.

    The answer to 0, 1 and 2 has a say in the choice of the kernel; that to others has none.
    `invariant` is met unless cuBLAS multiplies: of float32, of rows that no kernel of ours reads,
    and on GPUs that were not measured.
    """
    if wants.invariant:
        wants = Wants(wants.rows, activation=wants.activation, bias=wants.bias, invariant=True)
    if wants.bias:
        wants = wants._replace(activation="", split=False, residual=False)
    if wants.activation or wants.rotate:
        wants = wants._replace(split=False)
    if wants.squares > 1 or weight.dtype == torch.float16:
        wants = wants._replace(squares=0)
    if wants.rows > 1:
        wants = wants._replace(residual=False)
    gated = wants.activation == "swiglu"
    problem = Problem(
        wants.rows,
        weight.outputs // 2 if gated else weight.outputs,
        weight.k,
        weight.dtype,
        gated,
        wants.split,
        wants.norm and not wants.parts,
        weight.aligned,
        wants.invariant,
        weight.form,
    )
    kernel, plan = _first(weight, problem)
    if wants.invariant and wants.activation and not getattr(plan, "rounds", False):
        # It would be computed from the sums.
        return choose(weight, wants._replace(activation=""))
    served = kernel.served(problem, wants, plan)
    met = wants._replace(
        norm=wants.norm and ("norm of parts" if wants.parts else "norm") in served,
        squares=wants.squares if "squares" in served else 0,
        rotate=wants.rotate if "rotate" in served else 0,
        residual=wants.residual and "residual" in served,
        activation=wants.activation if "activation" in served else "",
        adapter=wants.adapter if "adapter" in served else None,
        rounded=wants.rounded and bool(wants.activation) and {"activation", "rounded"} <= served,
        invariant=wants.invariant and (plan is not None or not wants.rows),
    )
    return Choice(kernel, plan, met)


def takes_rounded(weight: Tensor | QuantisedWeight, major: int) -> bool:
    """Whether products by a weight take rows that are in FP8 already, of any number."""
    if not isinstance(weight, QuantisedWeight) or major != MEASURED_MAJOR:
        return False
    outputs, k = weight.shape
    shape = WeightShape(outputs, k, weight.dtype, major, form=weight.form)
    return choose(shape, Wants(SPLIT_ROWS + 1)).kernel is SCALED


def _first(weight: WeightShape, problem: Problem) -> tuple[ProductKernel, Any]:
    is_ours = weight.major == MEASURED_MAJOR and problem.rows > 0
    is_ours &= not problem.invariant or problem.itemsize == 2
    if is_ours and problem.k * problem.itemsize % 16 == 0:
        kernels = INVARIANT if problem.invariant else PRODUCTS
        for kernel in kernels if problem.form is None else QUANTISED:
            plan = kernel.plan(problem)
            if plan is not None:
                return kernel, plan
    return CUBLAS if problem.form is None else WIDENED, None


def choose_for(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    major: int | None = None,
    ranks: int = 1,
    **wants: Any,
) -> Choice:
    """`choose` for the rows of x, or of what x is made of, and a weight `[outputs, k]`.

    Args:
        major: compute capability of the GPU; 0: a CPU. None: of the device of x.
        ranks: the product takes the rows of so many ranks, of which x has one rank's.
        wants: fields of `Wants`, but for the rows.
    """
    if major is None:
        major = _major(x.device.index) if x.is_cuda else 0
    if not major or not weight.is_contiguous():
        return WITHOUT_WANTS
    form = weight.form if isinstance(weight, QuantisedWeight) else None
    codes = weight.codes if isinstance(weight, QuantisedWeight) else weight
    aligned = may_be_copied(x) and may_be_copied(codes)
    outputs, k = weight.shape
    shape = WeightShape(outputs, k, weight.dtype, major, aligned, form)
    return choose(shape, Wants(x.size(-2) * ranks, **wants))


@lru_cache
def _major(device_index: int) -> int:
    return torch.cuda.get_device_capability(device_index)[0]


@op
def product(
    x: Tensor | Stream,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None = None,
    choice: Choice | None = None,
    added: Tensor | None = None,
    places: QkvPlaces | None = None,
    rounded: RoundedRows | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, by a choice, with the wants that the choice meets.

    An activation behind it is `silu(gate) * up` where `[gate; up] = x @ weight.T`, the gated MLP's
    first half, or `relu(x @ weight.T) ** 2`, for an MLP without a gate (So et al. 2021). Where
    `places` are given, the product's rows are rotated and appended as by `rope_append`.

    Args:
        x: `[rows, k]` on a GPU, bfloat16, float16 or float32; or rows whose norm is to be taken, or
            ended, first: a norm that the choice does not meet is launched here.
        weight: `[n, k]`, same dtype; of SwiGLU `[2 * n, k]`. By a quantised one, rows are rounded
            first if its form says so.
        bias: `[n]` or None.
        choice: from `choose_for` of x and the weight; None: without any wants.
        added: `[rows, n]`, added to the rounded product; if the choice meets `residual`.
        places: where keys and values go, and what turns queries and keys; if it meets `rotate`. The
            weight is of `linear_qkv` in Megatron's order, `[kv_heads * (group + 2) * dim, k]`.
        rounded: where the activation's rows go; if it meets `rounded`.

    Returns:
        `[rows, n]`, of `rounded` the codes; partial sums `[splits, rows, n]`, float32, to be added
        in order; or queries `[rows, kv_heads * group, dim]`, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or the choice does not meet what is given.
    """
    if not isinstance(x, Stream):
        rows = x
    elif x.squares is not None:
        rows = x.divided()
    else:
        rows, x.total = add_rms_norm.reference(*x.norm_arguments)
    if isinstance(weight, QuantisedWeight):
        exact = F.linear(weight.rounded(rows).float(), weight.values())
        y = (exact if bias is None else exact + bias).to(rows.dtype)
    else:
        y = F.linear(rows, weight, bias)
    if choice is not None and choice.met.activation:
        gated = choice.met.activation == "swiglu"
        return swiglu.reference(y) if gated else squared_relu.reference(y)
    if added is not None:
        return y + added
    if places is None:
        return y
    places.group(weight.size(0))
    return rope_append.reference(
        y,
        places.cos,
        places.sin,
        places.position_ids[: len(y)],
        places.write_index[: len(y)],
        places.key_cache,
        places.value_cache,
        scales=places.scales,
    )


@product.gpu
def product_gpu(
    x: Tensor | Stream,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None = None,
    choice: Choice | None = None,
    added: Tensor | None = None,
    places: QkvPlaces | None = None,
    rounded: RoundedRows | None = None,
) -> Tensor:
    rows = x.value if isinstance(x, Stream) else x
    if choice is None:
        choice = choose_for(rows, weight, bias=bias is not None)
    kernel, plan, met = choice
    squares = x.squares if isinstance(x, Stream) else None
    given_wants = {"residual": added, "rotate": places, "squares": squares, "rounded": rounded}
    for want, value in given_wants.items():
        if value is not None and not getattr(met, want):
            raise ValueError(
                f"product: {tuple(rows.shape)} by {tuple(weight.shape)} ({kernel.name}) does not "
                f"serve {want}: choose with Wants({want}=...) first, and ask what is met."
            )
    given: dict[str, Any] = {} if added is None else {"added": added}
    if places is not None:
        given["places"] = places
    if rounded is not None:
        given["rounded"] = rounded
    given_x: Tensor | Stream = x
    if isinstance(x, Stream) and x.weight is not None and not met.norm and squares is None:
        given_x, x.total = add_rms_norm_gpu(*x.norm_arguments)
    return kernel.launch(given_x, weight, bias, met.activation, plan, **given)


@product.gpu
@promising("invariant")
def product_invariant_gpu(
    x: Tensor | Stream,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None = None,
    choice: Choice | None = None,
    added: Tensor | None = None,
    places: QkvPlaces | None = None,
    rounded: RoundedRows | None = None,
) -> Tensor:
    rows = x.value if isinstance(x, Stream) else x
    if choice is None:
        choice = choose_for(rows, weight, bias=bias is not None, invariant=True)
    if not choice.met.invariant:
        raise ConfigurationError(
            f"product: {tuple(rows.shape)} {rows.dtype} by {tuple(weight.shape)} "
            f"({choice.kernel.name}) has no order of sums that does not depend on the rows: it "
            "takes 16-bit numbers, rows of multiples of 16 bytes and a Hopper GPU."
        )
    return product_gpu(x, weight, bias, choice, added, places)
