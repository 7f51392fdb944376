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
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.persistent.persistent_layers import LayerWeights, PersistentLayers
from megatron_async.ops.persistent.persistent_plan import LayerSizes

SHAPES = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
LENGTHS = (128, 2048)
BLOCK_SIZE = 64


def sizes_of(shape: str) -> LayerSizes:
    """Sizes of a model's layers."""
    model = DUMMY_SHAPES[shape]
    return LayerSizes(
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_query_groups,
        model.num_attention_heads // model.num_query_groups,
        model.kv_channels,
    )


def need(shape: str, length: int) -> Need:
    """The bytes of all weights, keys and values, and two operations for each weight."""
    model = DUMMY_SHAPES[shape]
    weights = sum(model.layer_parameters(kind, 0) for kind in model.pattern)
    return Need(2 * weights + length * model.kv_bytes_per_token(2), 2.0 * weights)


def chain(shape: str, length: int, block_size: int) -> Chain:
    """A step's layers, on random numbers."""
    sizes, layers = sizes_of(shape), DUMMY_SHAPES[shape].num_layers
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
    shapes=SHAPES,
    default_shapes=SHAPES,
    parts=(),
    references=(),
    add_options=lambda group: None,
    cases=cases,
)
