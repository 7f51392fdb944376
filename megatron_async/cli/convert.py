"""`megatron-async convert`: a model as another checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_async.checkpoints.files import check_target
from megatron_async.cli.early_checks import check_early
from megatron_async.cli.files import check_folder
from megatron_async.cli.options import (
    MODEL_HELP,
    NO_PROGRESS,
    PROGRAM,
    Rows,
    add_dtype,
    add_rows,
)
from megatron_async.cli.terminal import raise_interrupts

OPTIONS: Rows = (
    ("--no-mtp", bool, None, False, "leave multi-token prediction out, if there is any"),
    ("--overwrite", bool, None, False, "replace what TARGET holds"),
    NO_PROGRESS,
)
FORMAT: Rows = (
    ("--to", ("torch_dist", "huggingface"), None, None,
     "format to write (default: torch_dist; huggingface with --quantization)"),
    ("--quantization", ("fp8", "fp8-channel"), None, None,
     "linear layers and experts in FP8, a scale for 128 x 128 weights or for each output"),
)  # fmt: skip


def add_convert(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `convert`."""
    convert = commands.add_parser(
        "convert",
        run=run_convert,
        parents=[common],
        help="write a model as a Megatron or a Hugging Face checkpoint",
        description="Write any model that loads as a Megatron torch_dist checkpoint folder\n"
        "or as a Hugging Face folder, bit for bit or in FP8, with its configuration and\n"
        "tokenizer.",
        epilog=f"""examples:
  {PROGRAM} convert smollm2 ./smollm2-megatron
  {PROGRAM} convert ./smollm2-megatron ./smollm2-hf --to huggingface
  {PROGRAM} convert ./my-llama ./my-llama-fp8 --quantization fp8""",
    )
    convert.add_argument("source", metavar="SOURCE", help=MODEL_HELP)
    convert.add_argument("target", metavar="TARGET", help="folder to write")
    add_rows(convert, FORMAT)
    add_dtype(convert)
    add_rows(convert, OPTIONS)


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    check_early(arguments.source, {})
    target = Path(arguments.target).expanduser().absolute()
    check_target(target, arguments.overwrite)
    check_folder("TARGET", target)

    from megatron_async.checkpoints.convert import convert

    raise_interrupts()
    convert(
        arguments.source,
        arguments.target,
        to=arguments.to,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        progress=not arguments.no_progress,
        with_mtp=False if arguments.no_mtp else None,
        quantization=arguments.quantization,
    )
    to = arguments.quantization or arguments.to or "torch_dist"
    print(f"wrote {arguments.target} ({to})")
    return 0
