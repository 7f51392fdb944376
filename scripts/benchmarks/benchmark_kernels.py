"""Time the engine's kernels, beside others' and beside what their bytes or operations need.

One table of cases (`kernel_cases/`, a file a family). Every time is a median over replays of a
graph on the engines' compute stream, of one layer or one call. The floor is the larger of two
times: the fewest bytes over the memory's bandwidth, and the operations over the matrix units' rate.
"-" stands where a kernel does not take a case, or is not at hand.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_cases import decode_attention, experts, fused_ops, linear, prefill_attention, recurrent
from kernel_cases.case import (
    BANDWIDTH,
    MATRIX_RATE,
    OURS,
    Case,
    Chain,
    Family,
    Hardware,
    microseconds,
)

from megatron_async.lab.benchmark_record import write_record

MODULES = (linear, experts, recurrent, decode_attention, prefill_attention, fused_ops)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in MODULES}
NAME_WIDTH = 46
BEST = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write a record of each family."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    families = [FAMILIES[name] for name in args.family]
    known = sorted({shape for family in families for shape in family.shapes})
    if unknown := sorted(set(args.shapes or ()) - set(known)):
        parser.error(f"no chosen family has the shape {unknown[0]!r}: use {', '.join(known)}")
    hardware = Hardware(args.bandwidth * 1e12, args.tflops * 1e12)
    if not any(True for family in families for _case in chosen_cases(family, args, hardware)):
        parser.error("these options leave no case: see --list")
    if args.list:
        for family in families:
            for case in chosen_cases(family, args, hardware):
                print(f"{family.name}: {case.name}")
        return
    if not torch.cuda.is_available():
        parser.exit(1, "benchmark_kernels: needs a CUDA device, and torch finds none.\n")
    for family in families:
        figures = measure_family(family, chosen_cases(family, args, hardware), args)
        if args.json and figures:
            path = record_path(args.json, family, len(families) > 1)
            write_record(path, family.record_name(args), {"device": "cuda", **vars(args)}, figures)


def make_parser() -> argparse.ArgumentParser:
    """Common options, and a group of options for each family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all"
    )
    parser.add_argument("--case", nargs="+", metavar="PART", help="cases with such a part of name")
    parser.add_argument("--list", action="store_true", help="print the cases; needs no GPU")
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="each family takes those that it knows"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", help="rows or tokens of a step (default: the family's)"
    )
    parser.add_argument("--block-size", type=int, help="of KV caches (default: the family's)")
    parser.add_argument("--ours-only", action="store_true", help="leave out others' kernels")
    parser.add_argument("--replays", type=int, default=3, help="of a graph in a window (default 3)")
    parser.add_argument(
        "--bandwidth", type=float, default=BANDWIDTH / 1e12,
        help="of the memory, for the floor: TB/s (default 4.3, an H200's, measured)",
    )  # fmt: skip
    parser.add_argument(
        "--tflops", type=float, default=MATRIX_RATE / 1e12,
        help="of the matrix units, for the floor: TFLOP/s (default 790, an H200's, measured)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE",
        help="write the figures as JSON; of several families each to FILE-<family>.json",
    )  # fmt: skip
    for family in FAMILIES.values():
        family.add_options(parser.add_argument_group(family.name, family.about))
    return parser


def chosen_cases(family: Family, args: argparse.Namespace, hardware: Hardware) -> Iterator[Case]:
    """The family's cases whose names have one of the parts asked for."""
    for case in family.cases(args, family.chosen_shapes(args.shapes), hardware):
        if args.case is None or any(part in case.name for part in args.case):
            yield case


def record_path(path: str, family: Family, several: bool) -> Path:
    """Where a family's record goes: the file named, or one beside it for each of several."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}-{family.name}{whole.suffix}") if several else whole


def measure_family(
    family: Family, cases: Iterable[Case], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print a line of the table for each case; return the figures of their record."""
    columns = [OURS, *family.parts, *(() if args.ours_only else family.references)]
    titles = "".join(f"{f'{column} us':>{cell_width(column)}}" for column in columns)
    figures: list[dict[str, Any]] = []
    for case in cases:
        if not figures:
            print(f"{'family':<18}{'case':<{NAME_WIDTH}}{titles}{'floor us':>11}{'ours/floor':>12}")
        figures.append(measure(family, case, columns, args.replays))
    return figures


@torch.inference_mode()
def measure(family: Family, case: Case, columns: Sequence[str], replays: int) -> dict[str, Any]:
    """Print one case's line; return its figures: "us" is ours, others by their column."""
    work = case.prepare()
    found: dict[str, float] = {}
    for column in columns:
        if column not in work.chains:
            if reason := work.refused.get(column):
                print(f"{case.name}: no {column}: {reason}", flush=True)
            continue
        try:
            found[column] = microseconds(work.chains[column], replays)
        except Exception as error:
            if column not in family.references:
                raise
            print(f"{case.name}: {column} does not run: {error}", flush=True)
    cells = "".join(
        f"{f'{found[column]:.2f}' if column in found else '-':>{cell_width(column)}}"
        for column in columns
    )
    ratio = found[OURS] / work.floor_us
    line = f"{family.name:<18}{case.name:<{NAME_WIDTH}}{cells}{work.floor_us:>11.2f}{ratio:>12.2f}"
    print(line, flush=True)
    print_best(work.candidates, replays)
    times = {"us" if name == OURS else f"{name}_us": us for name, us in found.items()}
    return {"case": case.name, **case.keys, **work.figures, "floor_us": work.floor_us, **times}


def print_best(candidates: Iterable[tuple[str, Chain]], replays: int) -> None:
    """Print the fastest of a kernel's variants."""
    found: list[tuple[float, str]] = []
    for name, chain in candidates:
        try:
            found.append((microseconds(chain, replays), name))
        except Exception as error:  # too many registers or too much shared memory
            print(f"  {name}: {type(error).__name__}")
    for time, name in sorted(found)[:BEST]:
        print(f"  {time:9.2f} us  {name}", flush=True)


def cell_width(column: str) -> int:
    """Characters of a column of times."""
    return max(10, len(column) + 5)


if __name__ == "__main__":
    main()
