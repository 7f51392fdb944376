"""Mamba-2 and Gated DeltaNet ops alone, in graphs over many layers' pools, against their bytes.

Decode rows stand at all phases of the flush rule, so one row in 16 writes its state. With
--megatron Megatron-Core's kernels of Mamba-2, and those of mamba-ssm and causal-conv1d where these
are installed, are timed beside ours (`mamba_megatron.py`); there are none for Gated DeltaNet.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kernel_cases import delta, mamba
from kernel_cases.case import Case, Chain, Family, Work
from kernel_cases.hardware import Hardware, Need
from megatron_async.ops.recurrent.delta_pools import DeltaShape
from megatron_async.ops.recurrent.mamba_pools import MambaShape

SHAPES: dict[str, MambaShape | DeltaShape] = {**mamba.SHAPES, **delta.SHAPES}
ROWS = (1, 16, 64, 256)
Make = Callable[[], dict[str, Chain]]


def prompt_lengths(prompts: str) -> list[int]:
    """Lengths of "LENGTH", or of "COUNTxLENGTH"."""
    count, _, length = prompts.rpartition("x")
    return [int(length)] * int(count or 1)


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Decode at each number of rows and width, then prefill of each set of prompts."""

    def prepare(make: Make, need: Need) -> Work:
        figures = {"operations": need.operations} if need.operations else {}
        return Work(make(), hardware.floor_us(need), figures)

    for name in shapes:
        shape = SHAPES[name]
        make: Make
        for rows, width in itertools.product(args.rows or ROWS, args.widths):
            if isinstance(shape, MambaShape):
                need = mamba.decode_need(shape, rows, width)
                make = partial(mamba.decode_chains, shape, rows, width, args.megatron)
            else:
                need = delta.decode_need(shape, rows, width)
                make = partial(delta.decode_chains, shape, rows, width)
            yield Case(f"{name} decode {rows} x {width}", {}, partial(prepare, make, need))
        for prompts in args.prompts:
            lengths = prompt_lengths(prompts)
            if isinstance(shape, MambaShape):
                need = mamba.prefill_need(shape, lengths)
                make = partial(mamba.prefill_chains, shape, lengths, args.megatron)
            else:
                need = delta.prefill_need(shape, lengths)
                make = partial(delta.prefill_chains, shape, lengths)
            yield Case(f"{name} prefill {prompts}", {}, partial(prepare, make, need))


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
