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

GPUS: dict[str, dict[str, Any]] = {
    "h100": {"gpu": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "processors": 132},
    "h200": {"gpu": "NVIDIA H200", "capability": [9, 0], "processors": 132},
}
"""GPUs as torch describes them (`ops.compile_kernels.describe_gpu`)."""
GPUS["sm_90"] = GPUS["h200"]
OPTIONS: Rows = (
    ("--gpu", tuple(GPUS), None, "h200", "GPU on which the model will run"),
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
    check_early(model, options, {}, arguments.draft_layer)
    if arguments.to is not None:
        folder = Path(arguments.to).expanduser().absolute()
        check_folder("--to", folder)
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    with importing_engine():
        from megatron_async.llm import compile_ahead

    raise_interrupts()
    start = time.perf_counter()
    kernels = compile_ahead(
        model, GPUS[arguments.gpu], arguments.dtype, arguments.draft_layer, **options
    )
    made = kernels.join(not arguments.no_progress)
    kernels.keep()
    if kernels.failures:
        raise RuntimeError(
            f"{len(kernels.failures)} failed; the first of them: {kernels.failures[0]}"
        )
    folder, seconds = kernels.list.folder, time.perf_counter() - start
    mib = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(
        f"{len(kernels.list.hashes)} kernels for {arguments.gpu}, {made} of them compiled in "
        f"{seconds:.0f} s; {folder} has {mib:.0f} MiB"
    )
    return 0
