"""Decode attention alone, in a graph over many layers' caches, against the bytes it must read.

The column "fp8" has keys and values in e4m3, whose bytes are half of the floor's. With --long-row
one row of each batch has that length: a long request among short ones.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import OURS, Case, Chain, Family, Hardware, Need, Work, layers_that_fit
from megatron_async.ops.attention import decode_attention as ops
from megatron_async.ops.attention.narrow_cache import NARROW, scales_of

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}
"""(query heads, KV heads, head dimension)."""
ROWS = (1, 16, 64, 256)
BLOCK_SIZE = 64


def kv_lengths(rows: int, length: int, long_row: int | None) -> list[int]:
    """Lengths that vary by 10 % between rows, and one long row in the middle if there is to be
    one."""
    lengths = [int(length * (0.9 + 0.1 * row / max(rows - 1, 1))) for row in range(rows)]
    if long_row is not None:
        lengths[rows // 2] = long_row
    return lengths


def token_bytes(shape: str) -> int:
    """Bytes of a token's key and value in one layer, bfloat16."""
    _heads, kv_heads, dim = SHAPES[shape]
    return kv_heads * dim * 4


def need(shape: str, lengths: Sequence[int]) -> Need:
    """The bytes of all keys and values; the operations of both products."""
    heads, _kv_heads, dim = SHAPES[shape]
    tokens = sum(lengths)
    return Need(tokens * token_bytes(shape), 4.0 * heads * dim * tokens)


def chain(shape: str, lengths: Sequence[int], block_size: int, is_narrow: bool = False) -> Chain:
    """A step's schedule, which its layers share, and the attention of each layer."""
    heads, kv_heads, dim = SHAPES[shape]
    cuda = torch.device("cuda")
    rows, blocks = len(lengths), [-(-length // block_size) for length in lengths]
    layer_bytes = sum(blocks) * block_size * token_bytes(shape) // (2 if is_narrow else 1)
    layers = layers_that_fit(layer_bytes)
    dtype = NARROW if is_narrow else torch.bfloat16
    cache = torch.empty(layers, 2, sum(blocks), block_size, kv_heads, dim, dtype=dtype, device=cuda)
    for layer in cache:
        layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=cuda))
    ones = torch.ones(kv_heads, device=cuda)
    scales = scales_of(ones, ones) if is_narrow else None
    tables = torch.zeros(rows, max(blocks), dtype=torch.int32)
    for row, own in enumerate(torch.randperm(sum(blocks)).split(blocks)):
        tables[row, : len(own)] = own
    tables = tables.to(cuda)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=cuda)
    query = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device=cuda)
    out = torch.empty_like(query)
    workspace = ops.DecodeWorkspace(rows, heads, kv_heads, dim, cuda)

    def run() -> None:
        workspace.schedule.update(on_device)
        out.zero_()  # so that the schedule is settled
        for keys, values in cache:
            ops.paged_decode_attention(
                query, keys, values, tables, dim**-0.5, workspace, out, is_settled=True,
                scales=scales,
            )  # fmt: skip

    return Chain(run, layers)


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Each shape at each number of rows and each length."""
    block_size = args.block_size or BLOCK_SIZE

    def prepare(shape: str, lengths: Sequence[int]) -> Work:
        floor = hardware.floor_us(need(shape, lengths))
        caches = {OURS: False, "fp8": True}
        chains = {column: chain(shape, lengths, block_size, it) for column, it in caches.items()}
        return Work(chains, floor)

    for shape, rows, length in itertools.product(shapes, args.rows or ROWS, args.lengths):
        keys = {"shape": shape, "rows": rows, "length": length}
        lengths = kv_lengths(rows, length, args.long_row)
        yield Case(f"{shape} {rows} x {length}", keys, partial(prepare, shape, lengths))


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of this family."""
    group.add_argument("--lengths", type=int, nargs="+", default=[256, 2048])
    group.add_argument("--long-row", type=int, help="length of one row of each batch")


def record(args: argparse.Namespace) -> str:
    """Batches with a long row are no points of the plot of even ones."""
    return "decode_attention" if args.long_row is None else "decode_attention_ragged"


FAMILY = Family(
    name="decode_attention",
    about="attention of decode rows over a paged cache, against its bytes",
    shapes=list(SHAPES),
    default_shapes=list(SHAPES),
    parts=("fp8",),
    references=(),
    add_options=add_options,
    cases=cases,
    record=record,
)
