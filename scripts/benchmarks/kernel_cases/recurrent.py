"""Mamba-2 and Gated DeltaNet ops alone, in graphs over many layers' pools, against their bytes.

Decode rows stand at all phases of the flush rule, so one row in 16 writes its state. With
--megatron Megatron-Core's kernels of Mamba-2, and those of mamba-ssm and causal-conv1d where these
are installed, are timed beside ours (`mamba_megatron.py`); there are none for Gated DeltaNet.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_cases.case import (
    OURS,
    Case,
    Chain,
    Family,
    Hardware,
    Need,
    Work,
    layers_that_fit,
    random,
)
from kernel_cases.mamba_megatron import megatron_decode, megatron_prefill
from megatron_async.ops.recurrent.delta_decode import delta_decode_gpu
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from megatron_async.ops.recurrent.delta_prefill import delta_prefill_gpu
from megatron_async.ops.recurrent.flush import flush_gpu
from megatron_async.ops.recurrent.gated_norms import gated_head_norm_gpu, gated_rms_norm_gpu
from megatron_async.ops.recurrent.mamba_decode import mamba_decode_gpu
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_prefill import mamba_prefill_gpu
from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
)

ROWS = (1, 16, 64, 256)
RULE = FlushRule()
TILE = 64
"""Tokens between which a prefill of Gated DeltaNet multiplies keys."""


@dataclass(frozen=True)
class Layer:
    """A layer of one kind.

    Attributes:
        shape: its sizes.
        state: shape of a row's state: heads, rows of a head, columns.
        gates: numbers of a token and head in the ring.
        decode, prefill: its ops.
    """

    shape: MambaShape | DeltaShape
    state: tuple[int, int, int]
    gates: int
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]

    @property
    def outputs(self) -> int:
        """Channels of the output."""
        return self.state[0] * self.state[1]

    @property
    def state_bytes(self) -> int:
        """A row's state in float32."""
        return self.outputs * self.state[2] * 4

    @property
    def token_bytes(self) -> int:
        """What a token must read and write beside the pools: all of in_proj's output but the gate,
        and the output."""
        return 2 * self.shape.in_proj

    def parameters(self) -> Any:
        """One layer's parameters."""
        heads = self.state[0]
        a_log = torch.log(torch.linspace(0.001, 0.1, heads, device="cuda"))
        weight = random(self.shape.conv_dim, 4)
        if isinstance(self.shape, DeltaShape):
            return DeltaParams(weight, random(heads), a_log)
        d = random(heads, dtype=torch.float32)
        return MambaParams(weight, random(self.shape.conv_dim), random(heads), a_log, d)

    def pools(self, rows: int, width: int) -> RecurrentPools:
        """Pools of as many layers as fit, so that no layer's state stays in a cache."""
        layers, ring = layers_that_fit(rows * self.state_bytes), RULE.ring_length(width)
        dt = torch.rand(layers, rows, ring, 1, self.state[0], device="cuda") / 10
        entries = random(layers, rows, ring, self.shape.ring_dim)
        if isinstance(self.shape, DeltaShape):
            entries *= self.shape.key_dim**-0.5  # the length of pseudo values and keys
        return RecurrentPools(
            random(layers, rows, *self.state, dtype=torch.float32),
            entries,
            torch.cat((-dt / 10, dt), 3) if self.gates > 1 else -dt,
            random(layers, rows, RULE.conv_length(width), self.shape.conv_dim),
        )

    def norm(self, y: Tensor, projected: Tensor) -> Callable[[], Tensor]:
        """The norm of outputs, with its gate."""
        shape = self.shape
        if isinstance(shape, DeltaShape):
            z = projected[:, shape.conv_dim : shape.conv_dim + shape.value_inner]
            return partial(gated_head_norm_gpu, y, z, random(shape.value_dim), 1e-6)
        z, weight = projected[:, : shape.d_inner], random(shape.d_inner)
        return partial(gated_rms_norm_gpu, y, z, weight, shape.groups, 1e-5)

    def operations(self) -> float:
        """Of a prefill's products, for a token. Mamba-2: those of a scan in chunks of 128, of which
        those of C and B are once a group. Gated DeltaNet: keys with keys and queries, twice with
        pseudo values in a tile, and three times with the state; without the triangular inverses."""
        heads, size, columns = self.state
        if isinstance(self.shape, MambaShape):
            return heads * (2 * 128 * size + 4 * size * columns) + 2 * 128 * self.shape.bc_dim
        in_tile = 2 * (2 * TILE * columns) + 2 * (2 * TILE * size)
        return float(heads * (in_tile + 3 * 2 * columns * size))


def _mamba(*sizes: int) -> Layer:
    shape = MambaShape(*sizes)
    state = shape.heads, shape.head_dim, shape.d_state
    return Layer(shape, state, 2, mamba_decode_gpu, mamba_prefill_gpu)


def _delta(*sizes: int) -> Layer:
    shape = DeltaShape(*sizes)
    state = shape.value_heads, shape.value_dim, shape.key_dim
    return Layer(shape, state, 1, delta_decode_gpu, delta_prefill_gpu)


SHAPES = {
    "nemotron-3-nano": _mamba(64, 64, 8, 128),
    "nemotron-nano-9b-v2": _mamba(128, 80, 8, 128),
    "granite-4.0-h-350m": _mamba(48, 32, 1, 128),
    "qwen3-next": _delta(16, 128, 32, 128),
    "qwen3.5-48": _delta(16, 128, 48, 128),
}


def decode_need(layer: Layer, rows: int, width: int) -> Need:
    """What a layer's decode needs."""
    state = layer.state_bytes * (1 + width / RULE.period)
    # On average half a period of entries, and the query tokens themselves, written and read.
    entry = layer.shape.ring_dim * 2 + layer.state[0] * layer.gates * 4
    ring = (RULE.period / 2 + 2 * width) * entry
    conv = (3 + width) * layer.shape.conv_dim * 2
    return Need(int(rows * (state + ring + conv + layer.token_bytes * width)))


def decode_chains(layer: Layer, rows: int, width: int, with_megatron: bool) -> dict[str, Chain]:
    """A decode step of each layer; its flush and its norms alone; what others have. Rows stand at
    all phases of the flush rule, behind a step of `width` tokens."""
    params, every = layer.parameters(), layer.pools(rows + 1, width)
    pools = [RecurrentPools(*pool) for pool in zip(*every)]
    first = 1000 + torch.arange(rows, device="cuda") * 7 % RULE.period
    before = ((first - width) // RULE.period * RULE.period).int()
    after = (first // RULE.period * RULE.period).int()
    positions = (first[:, None] + torch.arange(width, device="cuda")).view(-1)
    step = DecodeRows(torch.arange(rows, device="cuda"), positions, after, width)
    projected, y = random(rows * width, layer.shape.in_proj), random(rows * width, layer.outputs)
    norm_once = layer.norm(y, projected)

    def ours() -> None:
        only_flush()
        for pool in pools:
            layer.decode(projected, params, pool, step, RULE, out=y)

    def only_flush() -> None:
        flush_gpu(every, step.row_index, before, after, RULE)

    def norm() -> None:
        for _ in pools:
            norm_once()

    runs = {OURS: ours, "flush": only_flush, "norm": norm}
    if with_megatron and isinstance(layer.shape, MambaShape):
        runs |= megatron_decode(layer.shape, params, pools, projected, step.row_index, width)
    return {name: Chain(run, len(pools)) for name, run in runs.items()}


def prefill_need(layer: Layer, lengths: list[int]) -> Need:
    """What a layer's prefill needs."""
    tokens = sum(lengths)
    moved = tokens * layer.token_bytes + len(lengths) * layer.state_bytes
    return Need(moved, tokens * layer.operations())


def prefill_chains(layer: Layer, lengths: list[int], with_megatron: bool) -> dict[str, Chain]:
    """A prefill of whole prompts by each layer, and Megatron-Core's."""
    params, tokens = layer.parameters(), sum(lengths)
    pools = [RecurrentPools(*pool) for pool in zip(*layer.pools(len(lengths) + 1, 1))][:4]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    index = torch.arange(len(lengths), device="cuda")
    rows = PrefillRows(ends, torch.zeros_like(ends[1:]), index, index, torch.ones_like(ends[1:]))
    base = (ends.diff() // RULE.period * RULE.period).int()
    projected, y = random(tokens, layer.shape.in_proj), random(tokens, layer.outputs)

    def ours() -> None:
        for pool in pools:
            layer.prefill(projected, params, pool, rows, base, RULE, out=y)

    runs = {OURS: ours}
    if with_megatron and isinstance(layer.shape, MambaShape):
        runs |= megatron_prefill(layer.shape, params, lengths, len(pools), projected, ends)
    return {name: Chain(run, len(pools)) for name, run in runs.items()}


def prompt_lengths(prompts: str) -> list[int]:
    """Lengths of "LENGTH", or of "COUNTxLENGTH"."""
    count, _, length = prompts.rpartition("x")
    return [int(length)] * int(count or 1)


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Decode at each number of rows and width, then prefill of each set of prompts."""

    def prepare(make: Callable[[], dict[str, Chain]], need: Need) -> Work:
        figures = {"operations": need.operations} if need.operations else {}
        return Work(make(), hardware.floor_us(need), figures)

    for name in shapes:
        layer = SHAPES[name]
        for rows, width in itertools.product(args.rows or ROWS, args.widths):
            make = partial(decode_chains, layer, rows, width, args.megatron)
            work = partial(prepare, make, decode_need(layer, rows, width))
            yield Case(f"{name} decode {rows} x {width}", {}, work)
        for prompts in args.prompts:
            lengths = prompt_lengths(prompts)
            make = partial(prefill_chains, layer, lengths, args.megatron)
            work = partial(prepare, make, prefill_need(layer, lengths))
            yield Case(f"{name} prefill {prompts}", {}, work)


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of this family."""
    group.add_argument("--widths", type=int, nargs="+", default=[1, 2])
    group.add_argument(
        "--prompts",
        nargs="+",
        default=["8192", "2048", "16x512", "64x32"],
        help="prompts of a step: a length, or COUNTxLENGTH",
    )
    group.add_argument(
        "--megatron",
        action="store_true",
        help="time Megatron-Core's, mamba-ssm's and causal-conv1d's kernels too",
    )


FAMILY = Family(
    name="recurrent",
    about="Mamba-2 and Gated DeltaNet, decode and prefill; their flush and norm alone",
    shapes=list(SHAPES),
    default_shapes=list(SHAPES),
    parts=("flush", "norm"),
    references=("megatron", "megatron_conv", "causal_conv1d", "mamba_ssm"),
    add_options=add_options,
    cases=cases,
)
