"""All layers of a step of one row in one kernel, in a graph, against the bytes of their weights.

`benchmark_engine.py steady --batch-sizes 1` times the same step kernel by kernel, with embedding,
vocabulary and sampling.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import OURS, Case, Chain, Family, Work
from kernel_cases.hardware import Hardware, Need
from megatron_async.ops.persistent.persistent_layers import LayerWeights, PersistentLayers
from megatron_async.ops.persistent.persistent_plan import LayerSizes

SHAPES = {
    "smollm2-135m": (LayerSizes(576, 1536, 3, 3, 64), 30),
    "llama-3.2-1b": (LayerSizes(2048, 8192, 8, 4, 64), 16),
    "llama-3.1-8b": (LayerSizes(4096, 14336, 8, 4, 128), 32),
}
"""Sizes and number of layers."""
LENGTHS = (128, 2048)
BLOCK_SIZE = 64


def weights_of(sizes: LayerSizes) -> int:
    """Numbers of one layer's products."""
    heads = sizes.heads * sizes.dim
    return sizes.hidden * (sizes.qkv + heads + 3 * sizes.ffn)


def need(shape: str, length: int) -> Need:
    """The bytes of all weights, keys and values, and two operations for each weight."""
    sizes, layers = SHAPES[shape]
    keys = 2 * length * sizes.kv_heads * sizes.dim
    weights = weights_of(sizes)
    return Need(2 * layers * (weights + keys), 2.0 * layers * weights)


def chain(shape: str, length: int, block_size: int) -> Chain:
    """A step's layers, on random numbers."""
    sizes, layers = SHAPES[shape]
    hidden, heads = sizes.hidden, sizes.heads * sizes.dim

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device="cuda") * size[-1] ** -0.5

    weights = [
        LayerWeights(
            numbers(sizes.qkv, hidden),
            numbers(hidden, heads),
            numbers(2 * sizes.ffn, hidden),
            numbers(hidden, sizes.ffn),
            torch.ones(hidden, dtype=torch.bfloat16, device="cuda"),
            torch.ones(hidden, dtype=torch.bfloat16, device="cuda"),
        )
        for _ in range(layers)
    ]
    blocks = -(-length // block_size)
    table = torch.randperm(blocks).to("cuda", torch.int32)
    cache = numbers(layers, 2, blocks, block_size, sizes.kv_heads, sizes.dim)
    angles = torch.rand(length, sizes.dim, device="cuda")
    position = torch.tensor([length - 1], device="cuda")
    place = table[-1:].long() * block_size + (length - 1) % block_size
    persistent = PersistentLayers(weights, sizes, 1e-5, sizes.dim**-0.5)
    x = torch.randn(1, hidden, dtype=torch.bfloat16, device="cuda")
    cos, sin = angles.cos(), angles.sin()

    def run() -> None:
        persistent.run(x, cos, sin, position, place, cache, table)

    return Chain(run, 1)


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Each shape at each length."""
    block_size = args.block_size or BLOCK_SIZE

    def prepare(shape: str, length: int) -> Work:
        floor = hardware.floor_us(need(shape, length))
        return Work({OURS: chain(shape, length, block_size)}, floor)

    for shape, length in itertools.product(shapes, LENGTHS):
        keys = {"shape": shape, "length": length}
        yield Case(f"{shape} 1 x {length}", keys, partial(prepare, shape, length))


FAMILY = Family(
    name="layers",
    about="all layers of a step of one row in one kernel",
    shapes=list(SHAPES),
    default_shapes=list(SHAPES),
    parts=(),
    references=(),
    add_options=lambda group: None,
    cases=cases,
)
