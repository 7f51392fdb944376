"""Matrix products of a decode step, beside cuBLAS.

Each product is a chain over several layers' weights in one graph. So the weights come from memory,
and the launch of a kernel while the kernel before it runs counts too. "layer" is a layer's products
in turn, with the norms and SwiGLU between them, ours fused where the engine fuses. The first
columns of the qkv product stand for attention's output. With --weights ours are kept in fewer bits,
but for the vocabulary's; cuBLAS has them in the dtype.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_cases.case import (
    CACHE_BYTES,
    OURS,
    Case,
    Chain,
    Family,
    Hardware,
    Need,
    Shelf,
    Work,
    random,
)
from kernel_cases.kept_weight import LAYOUTS, MODEL, bytes_of_number, draw
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.linear.activations import squared_relu_gpu, swiglu_gpu
from megatron_async.ops.linear.product_kernel import Activation
from megatron_async.ops.linear.products import choose_for, product_gpu
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.widen import widen

EPS = 1e-5
ROWS = (1, 4, 16, 64)
VOCABULARY = "vocabulary"
LAYER = "layer"


def sizes(shape: ModelArchitecture) -> dict[str, tuple[int, int]]:
    """Columns of the output and of the input, by product."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    heads = shape.num_attention_heads * shape.kv_channels
    qkv = heads + 2 * shape.num_query_groups * shape.kv_channels
    found = {"qkv": (qkv, hidden), "proj": (hidden, heads)}
    found |= {"fc1": (2 * ffn, hidden), "fc2": (hidden, ffn)}
    return found | {VOCABULARY: (shape.vocab_size, hidden)}


def needs(
    shape: ModelArchitecture, rows: int, itemsize: int, weights: str = MODEL
) -> dict[str, Need]:
    """The bytes of the weights and the operations, by product and of the whole layer."""
    kept = bytes_of_number(weights, itemsize)
    elements = {name: n * k for name, (n, k) in sizes(shape).items()}
    elements[LAYER] = sum(count for name, count in elements.items() if name != VOCABULARY)
    return {
        name: Need(n * (itemsize if name == VOCABULARY else kept), 2.0 * rows * n)
        for name, n in elements.items()
    }


def multiply(
    x: Tensor | Stream,
    weight: Tensor | QuantisedWeight,
    activation: Activation = "",
    may_split: bool = False,
) -> Tensor:
    """A product as the engine computes it, and the activation behind it."""
    rows, norm = (x.value, True) if isinstance(x, Stream) else (x, False)
    choice = choose_for(rows, weight, norm=norm, activation=activation, split=may_split)
    y = product_gpu(x, weight, choice=choice)
    if activation == choice.met.activation:
        return y
    return swiglu_gpu(y) if activation == "swiglu" else squared_relu_gpu(y)


class Layers:
    """Random weights of several layers, and their products."""

    def __init__(self, shape: ModelArchitecture, dtype: torch.dtype, weights: str = MODEL) -> None:
        self.heads = shape.num_attention_heads * shape.kv_channels
        layer_bytes = needs(shape, 1, dtype.itemsize, weights)[LAYER].moved
        count = max(2, min(32, int(4 * CACHE_BYTES / layer_bytes)))
        self.weights = {
            name: [
                draw(MODEL if name == VOCABULARY else weights, n, k, dtype=dtype, scale=k**-0.5)
                for _ in range(2 if name == VOCABULARY else count)
            ]
            for name, (n, k) in sizes(shape).items()
        }
        self.wide = {name: [widen(each) for each in kept] for name, kept in self.weights.items()}
        self.norm = torch.ones(shape.hidden_size, dtype=dtype, device="cuda")

    def chain(self, name: str, rows: int, ours: bool) -> Chain:
        """A product, or the layer, over all layers; by cuBLAS where it is not ours."""
        if name == LAYER:
            x = random(rows, len(self.norm), dtype=self.norm.dtype)
            return Chain(partial(self._layers, x, ours), len(self.weights["qkv"]))
        weights = self.weights[name]
        x = random(rows, weights[0].size(1), dtype=weights[0].dtype)
        return Chain(partial(self._product, name, x, ours), len(weights))

    def _product(self, name: str, x: Tensor, ours: bool) -> None:
        for weight, wide in zip(self.weights[name], self.wide[name], strict=True):
            if name == "fc1":
                multiply(x, weight, "swiglu") if ours else swiglu_gpu(F.linear(x, wide))
            elif ours:
                multiply(x, weight, may_split=name in ("proj", "fc2"))
            else:
                F.linear(x, wide)

    def _layers(self, x: Tensor, ours: bool) -> None:
        residual: Tensor | None = None
        if ours:
            for qkv, proj, fc1, fc2 in zip(*list(self.weights.values())[:4], strict=True):
                x, residual = self._layer(x, residual, qkv, proj, fc1, fc2)
        else:
            for own in zip(*list(self.wide.values())[:4], strict=True):
                x, residual = self._cublas_layer(x, residual, *own)

    def _layer(
        self,
        x: Tensor,
        residual: Tensor | None,
        qkv: Tensor | QuantisedWeight,
        proj: Tensor | QuantisedWeight,
        fc1: Tensor | QuantisedWeight,
        fc2: Tensor | QuantisedWeight,
    ) -> tuple[Tensor, Tensor]:
        stream = Stream(x, residual, self.norm, EPS)
        x = multiply(self._whole(stream), qkv)
        x = multiply(x[:, : self.heads], proj, may_split=True)
        stream = Stream(x, stream.total, self.norm, EPS)
        x = multiply(self._whole(stream), fc1, "swiglu")
        assert stream.total is not None
        return multiply(x, fc2, may_split=True), stream.total

    def _whole(self, stream: Stream) -> Tensor | Stream:
        """The stream, or its norm where its value is partial sums."""
        if stream.is_whole:
            return stream
        normed, stream.total = add_rms_norm_gpu(*stream.norm_arguments)
        return normed

    def _cublas_layer(
        self,
        x: Tensor,
        residual: Tensor | None,
        qkv: Tensor,
        proj: Tensor,
        fc1: Tensor,
        fc2: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, residual = add_rms_norm_gpu(x, residual, self.norm, EPS)
        x = F.linear(F.linear(x, qkv)[:, : self.heads], proj)
        x, residual = add_rms_norm_gpu(x, residual, self.norm, EPS)
        return F.linear(swiglu_gpu(F.linear(x, fc1)), fc2), residual


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Each product of each shape at each number of rows."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    shelf: Shelf[Layers] = Shelf()

    def prepare(name: str, rows: int, product: str, need: Need) -> Work:
        layers = shelf.take(name, lambda: Layers(DUMMY_SHAPES[name], dtype, args.weights))
        chains = {OURS: layers.chain(product, rows, True)}
        chains["cublas"] = layers.chain(product, rows, False)
        return Work(chains, hardware.floor_us(need))

    for name in shapes:
        for rows in args.rows or ROWS:
            found = needs(DUMMY_SHAPES[name], rows, dtype.itemsize, args.weights)
            for product, need in found.items():
                keys = {"shape": name, "rows": rows, "product": product}
                if args.weights != MODEL:
                    keys["weights"] = args.weights
                case = f"{name} {rows} {product}"
                yield Case(case, keys, partial(prepare, name, rows, product, need))


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of this family."""
    group.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    group.add_argument(
        "--weights", default=MODEL, choices=[MODEL, *LAYOUTS],
        help="how weights are kept, also those of experts (model: in the dtype)",
    )  # fmt: skip


FAMILY = Family(
    name="linear",
    about="matrix products of a decode step, and a layer of them, beside cuBLAS",
    shapes=list(DUMMY_SHAPES),
    default_shapes=["smollm2-135m", "llama-3.1-8b"],
    parts=(),
    references=("cublas",),
    add_options=add_options,
    cases=cases,
)
