"""`megatron-async tune`: measure what timing decides, and keep it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.files import check_writable
from megatron_async.cli.options import (
    JSON,
    LAYERS,
    MODEL_HELP,
    NO_BARS,
    PROGRAM,
    Rows,
    add_engine_options,
    add_parallel,
    add_rows,
    engine_options,
    parallel_sizes,
)
from megatron_async.cli.output import print_json
from megatron_async.cli.parser import add_model, take_model
from megatron_async.cli.ranks import end_together, is_first_rank
from megatron_async.cli.terminal import importing_engine, raise_interrupts
from megatron_async.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_async.choices import Choices

OPTIONS: Rows = (
    ("--into", Path, "FILE", None,
     "write the rows into a table of rows too, such as this package's choices.json;\n"
     "rows that it has for other GPUs, shapes and versions stay"),
    JSON,
    NO_BARS,
)  # fmt: skip


def add_tune(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `tune`."""
    tune = commands.add_parser(
        "tune",
        run=run_tune,
        parents=[common],
        help="measure once which kernels and sizes are fastest on this GPU",
        description="Build a model on a GPU, measure the choices that depend on times there, and\n"
        "keep them in the user's cache, where later starts with the same settings find them.",
        epilog=f"""examples:
  {PROGRAM} tune ./my-llama
  {PROGRAM} tune dummy:llama-3.1-8b --max-requests 512""",
    )
    add_model(tune.add_argument_group("model"), MODEL_HELP)
    add_rows(add_engine_options(tune), [LAYERS])
    add_parallel(tune, "tune")
    add_rows(tune.add_argument_group("output"), OPTIONS)


def run_tune(arguments: argparse.Namespace) -> int:
    """Measure, and say what was kept."""
    model, sizes = take_model(arguments), parallel_sizes(arguments)
    options = {"choices": "measure"} | engine_options(arguments)
    if options["choices"] != "measure":
        raise ValueError(f"--choices {options['choices']}: tune measures; leave it out.")
    check_early(model, options, sizes)
    if (table := arguments.into) is not None:
        table = table.resolve()  # a link's target is read and replaced, not the link
        check_writable("--into", table)

    with importing_engine():
        from megatron_async.choices import merged, write_rows
        from megatron_async.devices import resolve_device_name
        from megatron_async.llm import LLM

    if resolve_device_name(options.get("device")).startswith("cpu"):
        raise ConfigurationError(
            "there is nothing to tune on a CPU: only kernels and sizes of a GPU are chosen by "
            "their times, so run this on a machine with the GPU, and without --device cpu."
        )
    if table is not None:
        merged(table, [])  # it is told now that the file is none
    progress = not arguments.no_progress and is_first_rank()
    with LLM(
        model, dtype=arguments.dtype, transformer_impl=arguments.transformer_impl,
        progress=progress, **sizes, **options,
    ) as llm:  # fmt: skip
        raise_interrupts()
        choices = llm.engine.context.choices
        if not llm.is_primary_rank:
            llm.follow()
    if is_first_rank():
        if table is not None:
            write_rows(table, merged(table, [row for row, _ in choices.used.values()]))
        if arguments.json:
            print_json({"choices": choices.records()})
        else:
            print(_told(choices))
    end_together()
    return 0


def _told(choices: Choices) -> str:
    from megatron_async.choices import known_rows

    shipped = [row.key for row, source in known_rows(choices.device.name) if source == "shipped"]
    lines = []
    for row, _ in choices.used.values():
        file = choices.files.get(row.kind)
        lines.append(f"{row.kind}, {row.gpu}: {json.dumps(row.value)}")
        lines.append("  not kept" if file is None else f"  kept in {file}")
        if row.key in shipped:
            lines.append("  a start takes the row for it that comes with this package")
    return "\n".join(lines) or (
        "nothing was to be chosen: there is one attention backend, and no mixed step is captured"
    )
