"""`megatron-async compile`: the kernels of a model, for a GPU that need not be there."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.files import check_folder
from megatron_async.cli.options import (
    DRAFT_LAYER_HELP,
    GPUS,
    MODEL_HELP,
    NO_PROGRESS,
    PROGRAM,
    Rows,
    add_engine_options,
    add_rows,
    engine_options,
)
from megatron_async.cli.parser import add_model, take_model
from megatron_async.cli.terminal import importing_engine, raise_interrupts

HOPPERS = tuple(word for word, gpu in GPUS.items() if gpu["capability"] == [9, 0])
OPTIONS: Rows = (
    ("--gpu", HOPPERS, None, "h200", "GPU on which the model will run"),
    ("--to", str, "FOLDER", None,
     "folder of the kernels, which later starts name as TRITON_CACHE_DIR; it must keep its path\n"
     "(default: in the user's cache, where starts look)"),
    ("--draft-layer", str, "FILE", None, DRAFT_LAYER_HELP),
    NO_PROGRESS,
)  # fmt: skip


def add_compile(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `compile`."""
    parser = commands.add_parser(
        "compile",
        run=run_compile,
        parents=[common],
        help="compile a model's kernels before its first start; needs no GPU",
        description="Compile the kernels with which a model starts on a GPU, on all cores.\n"
        "Neither a GPU nor the weights are needed: in a container's image, or before a download.",
        epilog=f"""examples:
  {PROGRAM} compile Qwen/Qwen3-8B --gpu h100
  {PROGRAM} compile ./my-llama --max-requests 512 --to /opt/kernels""",
    )
    add_model(parser, MODEL_HELP)
    add_rows(parser, OPTIONS)
    add_engine_options(parser)


def run_compile(arguments: argparse.Namespace) -> int:
    """Compile, and say what was made."""
    model = arguments.model = take_model(arguments)
    options = engine_options(arguments)
    device = options.pop("device", None)
    if device is not None and not device.startswith("cuda"):
        raise ValueError(f"--device {device} has no compiled kernels: give cuda, or leave it out.")
    check_early(model, options, {}, arguments.draft_layer)
    if arguments.to is not None:
        folder = Path(arguments.to).expanduser().absolute()
        check_folder("--to", folder)
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    with importing_engine():
        from megatron_async.llm import compile_ahead

    raise_interrupts()
    start = time.perf_counter()
    with compile_ahead(
        model, GPUS[arguments.gpu], arguments.dtype, arguments.draft_layer, **options
    ) as kernels:
        kernels.join(not arguments.no_progress)
    if failures := kernels.failures:
        raise RuntimeError(f"{len(failures)} failed; the first of them: {failures[0]}")
    kernels.keep()
    folder, seconds = kernels.folder, time.perf_counter() - start
    mib = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    made = f"{kernels.total} kernels for {arguments.gpu} in {seconds:.0f} s"
    print(f"{made}; {folder} has {mib:.0f} MiB")
    return 0
