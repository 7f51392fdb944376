"""Fused ops beside their references in plain torch, on arguments of the ops' cases (`cases.py` of
their tests).

Graphs hold many calls in a row. Inputs and outputs stay in the L2 cache where they fit, as they do
between the kernels of a decode step; so a small kernel can beat the floor, which counts the fewest
bytes, and its time is what the launch in a graph costs.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_cases.case import DTYPE, OURS, Case, Family, Hardware, Need, Work, random, repeated
from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.linear.activations import swiglu
from megatron_async.ops.linear.products import choose_for, product_gpu
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.op import Op
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, sample
from megatron_async.ops.sampling.slot_records import HEADER, RECORD_WORDS, Header, pack_record
from tests.unit_tests.ops.attention.cases import rope_arguments
from tests.unit_tests.ops.cases import Arguments, Numbers
from tests.unit_tests.ops.linear.cases import activation_arguments, norm_arguments

ROWS = (1, 16, 64, 256)
POSITIONS = 4096
BLOCK_SIZE = 64
OUR_CALLS, TORCH_CALLS = 50, 2
"""Calls in a graph."""


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    hidden: int
    kv_heads: int
    group: int
    dim: int
    ffn: int
    vocab: int

    @property
    def qkv(self) -> int:
        """Outputs of the qkv product."""
        return self.kv_heads * (self.group + 2) * self.dim


SHAPES = {
    "smollm2-135m": Shape(576, 3, 3, 64, 1536, 49152),
    "llama-3.1-8b": Shape(4096, 8, 4, 128, 14336, 128256),
}
CUDA = Numbers("cuda", DTYPE)
Pair = tuple[Callable[[], object], Callable[[], object]]
"""A fused call and its reference."""


def pair(op: Op[..., Any], arguments: Arguments) -> Pair:
    """An op's kernel and its reference."""
    ours = op.on("gpu")
    return lambda: ours(*arguments), lambda: op.reference(*arguments)


def norm_pair(shape: Shape, rows: int) -> Pair:
    """Residual add and norm."""
    return pair(add_rms_norm, norm_arguments(CUDA, rows, shape.hidden))


def rope_rows(shape: Shape, rows: int) -> Arguments:
    """Of `rope_append`, at random positions."""
    heads = shape.kv_heads, shape.group, shape.dim
    return rope_arguments(
        CUDA, rows, *heads, blocks=rows, block_size=BLOCK_SIZE, positions=POSITIONS
    )


def rope_pair(shape: Shape, rows: int) -> Pair:
    """Rotation of queries and keys, and the append of keys and values."""
    return pair(rope_append, rope_rows(shape, rows))


def qkv_pair(shape: Shape, rows: int) -> Pair:
    """The qkv product, rotation and append: in one kernel where a model has it so, else in two."""
    x, weight = random(rows, shape.hidden), random(shape.qkv, shape.hidden)
    _, *others = rope_rows(shape, rows)
    fused, places = rope_append.on("gpu"), QkvPlaces(*others[:6])

    def ours() -> Tensor:
        choice = choose_for(x, weight, rotate=shape.dim)
        if choice.met.rotate:
            return product_gpu(x, weight, choice=choice, places=places)
        return fused(product_gpu(x, weight), *others)

    return ours, lambda: rope_append.reference(F.linear(x, weight), *others)


def swiglu_pair(shape: Shape, rows: int) -> Pair:
    """SwiGLU."""
    return pair(swiglu, activation_arguments(CUDA, rows, 2 * shape.ffn))


BLOCK_OPS = {
    "add_rms_norm": norm_pair,
    "rope_append": rope_pair,
    "qkv, rope_append": qkv_pair,
    "swiglu": swiglu_pair,
}


def block_bytes(shape: Shape, rows: int) -> dict[str, int]:
    """The fewest bytes of each of `BLOCK_OPS`."""
    qkv, angles = shape.qkv, rows * shape.dim * 4
    return {
        "add_rms_norm": (4 * rows + 1) * shape.hidden * 2,
        "rope_append": 2 * rows * qkv * 2 + angles,
        "qkv, rope_append": (rows * (shape.hidden + qkv) + shape.hidden * qkv) * 2 + angles,
        "swiglu": 3 * rows * shape.ffn * 2,
    }


@dataclass(frozen=True)
class Rule:
    """How the rows of a sampling case sample, and the mode that the kernel is captured for."""

    mode: SamplingMode
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0


RULES = {
    "greedy": Rule(SamplingMode.GREEDY),
    "greedy rows of any": Rule(SamplingMode.FILTERED),
    "temperature": Rule(SamplingMode.SOFTMAX, 0.8),
    "top_k 50 top_p 0.9": Rule(SamplingMode.FILTERED, 0.8, 50, 0.9),
    "top_p 0.9": Rule(SamplingMode.FILTERED, 0.8, 0, 0.9),
    "min_p 0.05": Rule(SamplingMode.FILTERED, 0.8, 0, 0.0, 0.05),
}


def sampling_pair(shape: Shape, rows: int, spread: float, rule: Rule) -> Pair:
    """Samples of rows that have one rule."""
    logits = spread * random(rows, shape.vocab)
    numbers = {
        Header.TEMPERATURE: rule.temperature,
        Header.TOP_K: rule.top_k,
        Header.TOP_P: rule.top_p,
        Header.MIN_P: rule.min_p,
    }
    row = torch.arange(rows, device="cuda")
    records = torch.zeros(rows, RECORD_WORDS, dtype=torch.int32, device="cuda")
    records[:, :HEADER] = torch.from_numpy(pack_record(numbers))
    records[:, Header.SEED_LOW] = row.int()
    params = SamplingRows(row, row.int(), records)
    return pair(sample, (logits, params, rule.mode))


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Norm, rope with KV append, the qkv product with both, SwiGLU; then each kind of sampled row
    at each spread."""

    def prepare(make: Callable[[], Pair], moved: int) -> Work:
        fused, unfused = make()
        chains = {OURS: repeated(fused, OUR_CALLS), "torch": repeated(unfused, TORCH_CALLS)}
        return Work(chains, hardware.floor_us(Need(moved)))

    def case(name: str, rows: int, kernel: str, make: Callable[[], Pair], moved: int) -> Case:
        keys = {"shape": name, "rows": rows, "kernel": kernel}
        return Case(f"{name} {rows} {kernel}", keys, partial(prepare, make, moved))

    for name in shapes:
        shape = SHAPES[name]
        for rows in args.rows or ROWS:
            for kernel, moved in block_bytes(shape, rows).items():
                yield case(name, rows, kernel, partial(BLOCK_OPS[kernel], shape, rows), moved)
            for spread in args.spread:
                for rule_name, rule in RULES.items():
                    make = partial(sampling_pair, shape, rows, spread, rule)
                    logits = rows * shape.vocab * DTYPE.itemsize
                    yield case(name, rows, f"{rule_name}, spread {spread:g}", make, logits)


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of this family."""
    group.add_argument(
        "--spread", type=float, nargs="+", default=[1.0, 4.0], help="of the sampled logits"
    )


FAMILY = Family(
    name="fused_ops",
    about="norm, rope, the qkv product with it, SwiGLU and sampling, beside their references",
    shapes=list(SHAPES),
    default_shapes=list(SHAPES),
    parts=(),
    references=("torch",),
    add_options=add_options,
    cases=cases,
)
