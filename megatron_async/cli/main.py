"""The command line: `megatron-async chat`, `generate`, `convert`, `compile`, `tune`, `info`,
`check`, `profile`, `replay`, `simulate`, `simulate-fleet`, `serve`, `coordinator`, `replica`,
`replicas` and `completion`.

Everything heavy (torch, Megatron-Core) is imported inside the commands, so that `--help` and a
mistyped option answer at once. A user's error ends in one line on stderr and exit status 2; with
`--debug` the traceback is shown as well.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.cli.completion import complete
from megatron_async.cli.early_checks import check_early
from megatron_async.cli.fields import flag
from megatron_async.cli.files import check_writable, written_as
from megatron_async.cli.option_names import in_options
from megatron_async.cli.options import (
    DEVICE,
    DRAFT_LAYER_HELP,
    GPUS,
    JSON,
    LAYERS,
    MODEL_HELP,
    NO_PROGRESS,
    PROGRAM,
    Rows,
    add_dtype,
    add_engine_options,
    add_parallel,
    add_rows,
    engine_options,
    metrics_server,
    parallel_sizes,
    port,
    show_logged_steps,
)
from megatron_async.cli.output import (
    as_record,
    describe,
    libraries_that_fit,
    print_answer,
    print_as_it_is_made,
    print_json,
    print_statistics,
    printer_of_ended,
)
from megatron_async.cli.parser import Parser, add_model, take_model
from megatron_async.cli.prompts import check_prompts, model_prompts, read_prompts
from megatron_async.cli.ranks import (
    end_together,
    gather_replicas,
    has_other_ranks,
    in_order_of_prompts,
    is_first_rank,
    is_to_say,
    quiet_ranks,
    say_goodbye_with,
)
from megatron_async.cli.sampling_options import add_sampling_options, given_sampling
from megatron_async.cli.terminal import (
    STATUS,
    ending_at_once,
    importing_engine,
    raise_interrupts,
    say_interrupted,
)
from megatron_async.config import CACHE_DTYPES
from megatron_async.errors import ConfigurationError, RecordingError, RequestError
from megatron_async.other_names import budgets_named_by_options
from megatron_async.version import __version__

PACKAGE = "megatron_async"
COMMANDS = (
    "cli.chat.add_chat",
    "cli.main.add_generate",
    "lab.bench_command.add_bench",
    "cli.convert.add_convert",
    "cli.compile.add_compile",
    "cli.main.add_info",
    "lab.profile_command.add_profile",
    "lab.simulate_command.add_replay_and_simulate",
    "lab.fleet_command.add_simulate_fleet",
    "lab.check_command.add_check",
    "cli.tune.add_tune",
    "cli.serve.add_serve",
    "cli.serving.add_serving",
    "cli.completion.add_completion",
)
"""What adds the commands, in the order of the help: by names, as rooms that stand beside the engine
are imported by no other."""
USER_ERRORS = (ValueError, OSError, RuntimeError, MemoryError)
"""What a value, a file or a machine of the user's can cause; anything else is a bug of ours."""


PROMPTS: Rows = (
    ("--draft-layer", str, "FILE", None, DRAFT_LAYER_HELP),
    ("-p --prompt", list, "TEXT", None, "a prompt; may be repeated"),
    ("--prompts-file", str, "FILE", None, "prompts, one a line; '-' reads standard input"),
)
CHAT_OR_RAW: Rows = (
    ("--chat", bool, None, False,
     "wrap each prompt in the model's chat template, as is done where it has one;\n"
     "an error where it has none"),
    ("--raw", bool, None, False, "go on from each prompt's text as it is, no template"),
)  # fmt: skip
OUTPUT: Rows = (
    ("--json", bool, None, False,
     "one JSON document: results and stats\n(several replicas: results and replica_stats, a list)"),
    ("--timeline", str, "FILE", None,
     "write what the CPU and the device did when, for https://ui.perfetto.dev\n"
     "(several replicas: each its own, replica 0's t.json is t-0.json)"),
    ("--metrics-port", port, "PORT", None,
     "meanwhile serve Prometheus metrics at http://127.0.0.1:PORT/metrics\n"
     "(several replicas: replica 1 at PORT+1, and so on)"),
    ("--record", str, "FILE", None,
     "write every arrival, plan and sample, for `replay`\n"
     "(several replicas: each its own, replica 0's run.rec is run-0.rec)"),
    NO_PROGRESS,
)  # fmt: skip
INFO: Rows = (
    ("--kv-cache-dtype", (*CACHE_DTYPES, "fp8_e4m3"), None, None,
     "precision of keys and values in the cache (default: what the model's files say)"),
    ("--quantization", ("file", "fp8", "none"), None, None,
     "weights of an engine with this setting (default: as an engine has them)"),
    ("--memory-gb", float, "GB", None, "plan for this much memory, not for what is"),
    ("--program", bool, None, False,
     "the kernels that each layer launches in a step, and the choices by time that\n"
     "are known, instead"),
    ("--rows", int, "N", None, "of --program: rows that decode a token (default: 1)"),
    ("--tokens", int, "N", None,
     "of --program: all tokens of the step; those beyond --rows are a prompt's\n"
     "(default: as many as rows)"),
    ("--gpu", tuple(GPUS), None, None,
     "of --program: by the rules for this GPU, which need not be here\n(default: the device)"),
    ("--batch-invariant-mode", bool, None, False, "of --program: with this mode of an engine"),
    JSON,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog=PROGRAM,
        description="Async-scheduled continuous-batching inference for Megatron-Core models.",
        epilog=f"Try `{PROGRAM} chat`, or `{PROGRAM} generate smollm2 -p 'Hello'`.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for name in COMMANDS:
        module, _, add = name.rpartition(".")
        getattr(import_module(f"{PACKAGE}.{module}"), add)(commands, common)
    return parser


def add_generate(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `generate`."""
    generate = commands.add_parser(
        "generate",
        run=run_generate,
        parents=[common],
        help="answer prompts, all at once",
        description="Answer one or many prompts at once through the async engine.",
        epilog=f"""examples:
  {PROGRAM} generate smollm2 --prompt "Why is the sky blue?"
  {PROGRAM} generate smollm2 -p "One" -p "Two" --temperature 0.8 --top-p 0.95
  {PROGRAM} generate ./my-llama --prompts-file prompts.txt --json > answers.json
  {PROGRAM} generate dummy:tiny --prompt "1 2 3" --timeline step.timeline.json""",
    )
    source = generate.add_argument_group("model and prompts")
    add_model(source, MODEL_HELP)
    add_rows(source, PROMPTS)
    add_rows(source.add_mutually_exclusive_group(), CHAT_OR_RAW)
    add_rows(source, [("--system", str, "TEXT", None, "system message, for the chat template")])

    add_sampling_options(generate)

    add_rows(add_engine_options(generate), [LAYERS])

    add_parallel(generate)

    add_rows(generate.add_argument_group("output"), OUTPUT)


def add_info(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `info`."""
    info = commands.add_parser(
        "info",
        run=run_info,
        parents=[common],
        help="architecture, memory needed, and the KV pool that fits",
        description="Print a model's architecture, its parameters, the memory they need and\n"
        "the KV pool that fits beside them. Or, with --program, the kernels of each layer in\n"
        "a step. No weights are loaded.",
        epilog=f"""examples:
  {PROGRAM} info smollm2
  {PROGRAM} info dummy:llama-3.1-8b --dtype bfloat16 --memory-gb 24
  {PROGRAM} info smollm2 --program --rows 16 --gpu h200""",
    )
    info.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_rows(info, [DEVICE])
    add_dtype(info)
    add_rows(info, INFO)


def run_generate(arguments: argparse.Namespace) -> int:
    """Answer the prompts; 1 if any request failed."""
    arguments.model = take_model(arguments)
    prompts = read_prompts(arguments)
    given = given_sampling(arguments)
    if given["return_log_probs"] and not arguments.json:
        raise ValueError("--log-probs and --prompt-log-probs are shown with --json: give that too.")
    options = engine_options(arguments)
    sizes = parallel_sizes(arguments)
    check_early(arguments.model, options, sizes, arguments.draft_layer)
    check_prompts(arguments, prompts)
    for option in ("timeline", "record"):
        if (file := getattr(arguments, option)) is not None:
            check_writable(flag(option), file)

    with importing_engine():
        from megatron_async.llm import LLM

    progress = not arguments.no_progress and is_first_rank()
    if arguments.logging_step_interval and is_first_rank():
        show_logged_steps()
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        transformer_impl=arguments.transformer_impl,
        progress=progress,
        timeline=arguments.timeline is not None,
        record=arguments.record,
        draft_layer=arguments.draft_layer,
        **sizes,
        **options,
    )
    raise_interrupts()
    # The answers are what was asked for: the failure of another file is told after them.
    lost_file: Exception | None = None
    is_shown = False
    try:
        with llm:
            prompts = prompts[llm.data_parallel_rank :: llm.data_parallel_size]
            inputs = model_prompts(llm, prompts, arguments)
            sampling = llm.default_sampling_params(**given)
            is_shown = not arguments.json and llm.data_parallel_size == 1
            with metrics_server(llm, arguments.metrics_port):
                # Log lines would break into an answer that is shown as it is made.
                is_one = len(prompts) == 1 and not arguments.logging_step_interval
                if is_shown and is_one and not has_other_ranks():
                    results = [print_as_it_is_made(llm.engine, prompts[0], inputs[0], sampling)]
                else:
                    on_end = printer_of_ended(prompts) if is_shown else None
                    results = llm.generate(inputs, sampling, progress, on_end)
            stats = dict(llm.engine.stats())
    except RecordingError as error:
        lost_file = error
    if llm.timeline is not None and llm.is_primary_rank:
        try:
            llm.timeline.save(llm.replica_file(arguments.timeline))
        except OSError as error:
            lost_file = error
    records = [as_record(*pair) for pair in zip(prompts, results)]
    replicas = gather_replicas(llm, {"results": records, "stats": stats})
    try:
        if is_first_rank():
            with written_as("standard output"):
                print_replicas(replicas, arguments.json, is_shown)
                sys.stdout.flush()
    finally:
        end_together()
    if lost_file is not None:
        raise lost_file
    failed = any(result["error"] for replica in replicas for result in replica["results"])
    return 1 if failed else 0


def print_replicas(replicas: Sequence[Mapping[str, Any]], as_json: bool, is_shown: bool) -> None:
    """Print the answers of all replicas in the order of prompts, unless they were shown as they
    ended, and their statistics."""
    results, stats = in_order_of_prompts(replicas), [replica["stats"] for replica in replicas]
    if as_json:
        of_replicas = {"stats": stats[0]} if len(stats) == 1 else {"replica_stats": stats}
        print_json({"results": results, **of_replicas})
    else:
        for result in () if is_shown else results:
            print_answer(result)
        if any(result["error"] is None for result in results):
            print_statistics(*stats)


def run_info(arguments: argparse.Namespace) -> int:
    """Print what a model is and needs."""
    check_early(arguments.model, {"device": arguments.device})
    if arguments.memory_gb is not None and not 0 < arguments.memory_gb < math.inf:
        raise ValueError(f"--memory-gb {arguments.memory_gb:g} must be above 0, and finite.")

    from megatron_async.checkpoints.info import format_info, model_info, model_program

    for name in () if arguments.program else ("rows", "tokens", "gpu", "batch_invariant_mode"):
        value = getattr(arguments, name)
        if value is not None and value is not False:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is of --program: give that too, or leave it out.")
    if arguments.program:
        rows = 1 if arguments.rows is None else arguments.rows
        tokens = rows if arguments.tokens is None else arguments.tokens
        major = None if arguments.gpu is None else GPUS[arguments.gpu]["capability"][0]
        lines = model_program(
            arguments.model,
            rows,
            tokens,
            arguments.device,
            arguments.dtype,
            major,
            arguments.gpu,
            arguments.batch_invariant_mode,
            arguments.quantization,
        )
        if arguments.json:
            print_json({"program": lines})
        else:
            print("\n".join(lines))
        return 0
    info = model_info(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        memory_gb=arguments.memory_gb,
        kv_cache_dtype=arguments.kv_cache_dtype or "auto",
        quantization=arguments.quantization,
    )
    if arguments.json:
        print_json({**asdict(info), "fits": info.fits, "kv_tokens": info.kv_tokens})
    else:
        print(format_info(info))
    return 0


def _user_errors() -> tuple[type[Exception], ...]:
    """`USER_ERRORS`, and ZMQ's, which are no OSErrors, as where no file descriptor is left."""
    zmq: Any = sys.modules.get("zmq")
    return USER_ERRORS if zmq is None else (*USER_ERRORS, zmq.ZMQError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        exit status: 0 done, 1 a request failed, 2 an error, 130 interrupted.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`: what is written there is not wanted
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    parser = build_parser()
    complete(parser)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    arguments = parser.parse_args(argv)
    # Said at import, and no concern of a user's: an escape in a docstring of Megatron-Core's (the
    # module of a compiler's warning is its path), and that there is no CUDA compiler.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*megatron.core")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    quiet_ranks()
    try:
        with ending_at_once(), budgets_named_by_options(), libraries_that_fit():
            status: int = arguments.run(arguments)
        with written_as("standard output"):
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        say_interrupted()
        return STATUS
    except BrokenPipeError:
        # The reader left (`| head`): nothing more to say, not even when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _user_errors() as error:
        if arguments.debug:
            traceback.print_exc()
        say_goodbye_with(error)
        said = describe(error)
        of_settings = ConfigurationError | RequestError
        is_of_settings = isinstance(error, of_settings) or isinstance(error.__cause__, of_settings)
        if is_of_settings and not isinstance(error, CheckpointError):
            said = in_options(said, vars(arguments))
        text = f"{PROGRAM}: error: {said}"
        if is_to_say(text, error):
            print(text, file=sys.stderr, flush=True)
        return 2
