"""The commands `megatron-async replay` and `megatron-async simulate`.

As in `cli/main.py`, everything heavy is imported inside the commands.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.cli.fields import flag
from megatron_async.cli.files import check_recording, check_writable
from megatron_async.cli.options import FIGURES, NO_BARS, Rows, add_rows

if TYPE_CHECKING:
    from megatron_async.config import InferenceConfig
    from megatron_async.lab.arrival_trace import LengthDistribution
    from megatron_async.lab.device_times import Machine, Reach
    from megatron_async.lab.model_shape import ModelShape

Setting = tuple[float, int, float | None]
"""Arrivals a second, lookahead, and `target_tpot_ms`."""

MACHINE_HELP = """how long steps take (default: %(default)s):
  h200:smollm2-135m    measured on one H200, bfloat16
  h200:llama-3.1-8b    the same, of the 8B shape
  PATH/TO/RUN.rec      fitted to a recording made on your machine (generate --record); right
                       as far as its steps reach: as many rows, prompt and context tokens"""

TRACE_OPTIONS: Rows = (
    ("num_requests", int, "N", 256, "requests of a trace"),
    ("prompt_mean", float, "N", 256.0, "mean prompt, tokens"),
    ("output_mean", float, "N", 128.0, "mean answer, tokens"),
    ("max_prompt_tokens", int, "N", 1024, "longest prompt"),
    ("max_output_tokens", int, "N", 512, "longest answer"),
    ("length_sigma", float, "N", 0.6, "standard deviation of the lengths' logarithm; 0: all equal"),
    ("seed", int, "N", 0, "of the whole trace"),
)
"""Options of `simulate`, those of `scripts/benchmarks/benchmark_engine.py throughput`."""

MEANS = {"prompt_mean": "max_prompt_tokens", "output_mean": "max_output_tokens"}
"""Option of a mean length -> option of the longest."""
MOST_REQUESTS = 2**20
MOST_TOKENS = 2**24

STEPS: Rows = (
    ("--lookahead", [int], "N", [0, 1, 2], None),
    ("--target-tpot-ms", [float], "N", [None],
     "milliseconds between two tokens of running requests that prompts shall not exceed\n"
     "(default: none)"),
    ("--late-launch", argparse.BooleanOptionalAction, None, None,
     "with lookahead 1, launch a step shortly before the running one ends (default: on)"),
)  # fmt: skip
ENGINE_OPTIONS: Rows = (
    ("max_requests", int, "N", None,
     "requests served at once (default: 256, or --max-step-tokens)"),
    ("max_tokens", int, "N", 2048, "token budget of one step"),
    ("mixed_step_tokens", int, "N", None,
     "tokens of a step with running requests, while few prompt\n"
     "tokens wait (default: of the machine's short step with the cheapest tokens)"),
    ("block_size_tokens", int, "N", 64, "tokens in a KV block"),
    ("num_kv_blocks", int, "N", None,
     "KV blocks (default: enough for all requests at their longest)"),
    ("paused_buffer_size_gb", float, "N", None, "most KV memory of paused requests, GiB"),
)  # fmt: skip
REPLAY: Rows = (
    ("--until-step", int, "N", None,
     "stop when step N is planned, and print slots, blocks and requests"),
    ("--allow-truncated", bool, None, False,
     "replay what there is of a recording that has no end (its run crashed)"),
)  # fmt: skip

SPEED: tuple[tuple[str, str, str], ...] = (
    ("served/s", "requests_per_second", "{:.2f}"),
    ("tok/s in", "tokens_in_per_second", "{:.0f}"),
    ("tok/s out", "tokens_out_per_second", "{:.0f}"),
    ("rows", "mean_rows", "{:.1f}"),
    ("overlap", "overlap_ratio", "{:.3f}"),
    ("GPU idle", "idle_share", "{:.3f}"),
    ("gap p99", "gap_p99_ms", "{:.2f}"),
)
SCHEDULE: tuple[tuple[str, str, str], ...] = (
    ("waiting", "mean_waiting", "{:.1f}"),
    ("pauses", "pauses", "{}"),
    ("evictions", "evictions", "{}"),
    ("zombies", "zombie_rows", "{}"),
    ("recomputed", "recomputed_tokens", "{}"),
    ("accepted", "accepted_tokens", "{}"),
)
"""The first two tables, none wider than a page: title, key of the figures, format."""


def parse_chances(text: str) -> list[float]:
    """Chances of an option, "0.8,0.6,0.45".

    Raises:
        argparse.ArgumentTypeError: one is no number from 0 to 1.
    """
    try:
        chances = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: {error}") from error
    if not all(0 <= chance <= 1 for chance in chances):
        raise argparse.ArgumentTypeError(f"{text!r}: each chance must lie between 0 and 1")
    return chances


DRAFTS: Rows = (
    ("--forced-acceptance", parse_chances, "P,P,...", [],
     "draft as many tokens for each row as there are chances that each is right,\n"
     "given those before it were (default: no drafts)"),
    ("--draft-us", float, "N", 0.0, "microseconds that drafting adds to a step (default: 0)"),
)  # fmt: skip


def add_replay_and_simulate(commands: Any, common: argparse.ArgumentParser) -> None:
    """Both commands' options."""
    add_replay(commands, common)
    add_simulate(commands, common)


def add_simulate(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `simulate`."""
    simulate = commands.add_parser(
        "simulate",
        run=run_simulate,
        parents=[common],
        help="serve random arrivals in virtual time, without a model",
        description="Serve requests that arrive at random through the real engine and scheduler,\n"
        "on a device that is only a clock: what another lookahead, batch or KV pool\n"
        "would do, in seconds and without a GPU.",
        epilog="""examples:
  megatron-async simulate --machine h200:llama-3.1-8b --rate 16 48 --lookahead 0 1 2
  megatron-async simulate --machine h200:llama-3.1-8b --rate 48 --lookahead 1 --target-tpot-ms 8 12
  megatron-async simulate --machine h200:llama-3.1-8b --rate 48 --lookahead 1 --no-late-launch
  megatron-async simulate --machine h200:llama-3.1-8b --rate 48 --mixed-step-tokens 2048
  megatron-async simulate --machine h200:llama-3.1-8b --rate 100 --num-kv-blocks 500
  megatron-async simulate --machine h200:llama-3.1-8b --rate 8 --forced-acceptance 0.8,0.6
  megatron-async simulate --machine run.rec --rate 4""",
    )
    add_machine(simulate, "h200:smollm2-135m")
    rates = ("--rate", [float], None, [64.0], "arrivals a second")
    trace, engine = map(simulate.add_argument_group, ("trace", "engine"))
    for group, rows in (
        (trace, [rates]), (engine, STEPS), (trace, TRACE_OPTIONS), (engine, ENGINE_OPTIONS),
        (engine, DRAFTS),
    ):  # fmt: skip
        add_rows(group, rows)
    add_rows(simulate, [FIGURES, NO_BARS])


def add_machine(parser: argparse.ArgumentParser, default: str) -> None:
    """The option `--machine`, with what a shell may complete."""
    machine: Any = parser.add_argument("--machine", default=default, help=MACHINE_HELP)
    machine.completer = machine_words


def machine_words(prefix: str, **_: Any) -> list[str]:
    """Machines of `simulate` with built-in times, and recordings."""
    from argcomplete.completers import FilesCompleter

    from megatron_async.lab.device_times import MACHINES

    return [*(n for n in MACHINES if n.startswith(prefix)), *FilesCompleter()(prefix)]


def add_replay(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `replay`."""
    replay = commands.add_parser(
        "replay",
        run=run_replay,
        parents=[common],
        help="schedule a recorded run again, step for step, without the model",
        description="Run the requests and samples of a recording through the real engine and\n"
        "scheduler, and compare every plan with the recorded one.",
        epilog="""examples:
  megatron-async generate --model smollm2 --prompt Hello --record run.rec
  megatron-async replay run.rec
  megatron-async replay run.rec --until-step 12""",
    )
    replay.add_argument("file", metavar="FILE", help="written by generate --record")
    add_rows(replay, REPLAY)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Print the tables and, with --json, write the figures."""
    settings = list(
        itertools.product(arguments.rate, arguments.lookahead, arguments.target_tpot_ms)
    )
    check_settings(arguments, settings)

    from megatron_async.lab.benchmark_record import write_record
    from megatron_async.lab.trace_server import latency_lines, setting_cells

    shape, machine = load_machine(arguments.machine)
    if arguments.draft_us:
        machine = replace(machine, device=replace(machine.device, draft_us=arguments.draft_us))
    figures = [simulate_one(arguments, shape, machine, *setting) for setting in settings]
    print(f"steps take the time of: {machine.source}")
    if machine.reach is not None:
        print(f"the recording reaches: {machine.reach}")
    print()
    head, *labels = setting_cells(figures)
    for columns in (SPEED, SCHEDULE):
        print(head + "".join(f"{title:>11}" for title, *_ in columns))
        for label, row in zip(labels, figures, strict=True):
            cells = (f"{layout.format(row[key]):>11}" for _, key, layout in columns)
            print(label + "".join(cells))
        print()
    print("\n".join(latency_lines(figures)))
    if machine.reach is not None:
        warn_of_guesses(machine.reach, figures)
    if arguments.json:
        given = {k: v for k, v in vars(arguments).items() if k not in ("run", "command")}
        write_record(arguments.json, "simulate", {"device": "cpu", **given}, figures)
    return 0


def check_settings(arguments: argparse.Namespace, settings: Sequence[Setting]) -> None:
    """Check all settings before torch is imported, which takes seconds.

    Raises:
        ConfigurationError: a value out of range.
        ValueError: a machine that is none, or an option without effect.
    """
    from megatron_async.errors import ConfigurationError

    for rate in arguments.rate:
        if not rate > 0:  # nan too
            raise ConfigurationError(f"--rate {rate:g} must be above 0 (inf: all at once).")
    if not 1 <= (count := arguments.num_requests) <= MOST_REQUESTS:
        raise ConfigurationError(f"--num-requests {count} must be from 1 to {MOST_REQUESTS}.")
    if arguments.seed < 0:
        raise ConfigurationError(f"--seed {arguments.seed} must be 0 or more.")
    if arguments.draft_us < 0:
        raise ConfigurationError(f"--draft-us {arguments.draft_us:g} must be 0 or more.")
    if arguments.draft_us and not arguments.forced_acceptance:
        raise ValueError("--draft-us is the time of drafts: give --forced-acceptance too.")
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    trace_lengths(arguments)
    for _, lookahead, target_tpot_ms in settings:
        engine_config(arguments, lookahead, target_tpot_ms)
    check_machine(arguments.machine)


def check_machine(name: str) -> None:
    """Check what `--machine` names; a recording is not read.

    Raises:
        ValueError: neither built in nor a file.
    """
    from megatron_async.lab.device_times import MACHINES

    if name not in MACHINES and not Path(name).is_file():
        raise ValueError(
            f"--machine {name} is neither a file nor one of {', '.join(MACHINES)}: make a "
            "recording with `megatron-async generate --record FILE`, or take a built-in one."
        )
    if name not in MACHINES:
        check_recording("--machine", name)


def warn_of_guesses(reach: Reach, figures: Sequence[Mapping[str, Any]]) -> None:
    """Say on stderr which figures are of steps that the recording has nothing of."""
    for row in figures:
        beyond = reach.exceeded_by(row["most_work"])
        if beyond:
            print(
                f"warning: rate {row['rate']:g}, lookahead {row['lookahead']} is a guess: its "
                f"steps have up to {', '.join(beyond)}. Record a run with as much at once.",
                file=sys.stderr,
            )


def load_machine(name: str) -> tuple[ModelShape, Machine]:
    """The model and the times that `--machine` asks for.

    Raises:
        ValueError: neither built in nor a file.
        RecordingError: the file is no recording, or too short to fit times to.
    """
    check_machine(name)

    from megatron_async.lab.device_times import MACHINES
    from megatron_async.lab.model_shape import ModelShape
    from megatron_async.models.dummy_shapes import DUMMY_SHAPES

    if name in MACHINES:
        architecture = DUMMY_SHAPES[name.partition(":")[2]]
        return ModelShape.of_architecture(architecture, "bfloat16"), MACHINES[name]
    from megatron_async.lab.fit import fit_machine
    from megatron_async.lab.recording import load_recording

    recording = load_recording(name)
    return recording.shape, fit_machine(recording)


def simulate_one(
    arguments: argparse.Namespace,
    shape: ModelShape,
    machine: Machine,
    rate: float,
    lookahead: int,
    target_tpot_ms: float | None,
) -> dict[str, Any]:
    """Figures of one setting."""
    from tqdm import tqdm

    from megatron_async.lab.arrival_trace import poisson_trace
    from megatron_async.lab.simulator import simulate

    prompts, outputs = trace_lengths(arguments)
    count, seed = arguments.num_requests, arguments.seed
    trace = poisson_trace(rate, count, prompts, outputs, shape.vocab_size, seed)
    config = engine_config(arguments, lookahead, target_tpot_ms)
    title = f"{rate:g}/s, lookahead {lookahead}"
    if target_tpot_ms is not None:
        title += f", target {target_tpot_ms:g} ms"
    with tqdm(
        total=count, unit="request", desc=title, disable=arguments.no_progress or None
    ) as bar:
        result = simulate(trace, shape, config, machine, bar.update, arguments.forced_acceptance)
    setting = {"rate": rate, "lookahead": lookahead, "target_tpot_ms": target_tpot_ms}
    return {**setting, "requests": count, **result.figures()}


def trace_lengths(
    arguments: argparse.Namespace,
) -> tuple[LengthDistribution, LengthDistribution]:
    """Lengths of prompts and of answers.

    Raises:
        ConfigurationError: a mean beyond the longest, or a deviation that is none.
    """
    from megatron_async.errors import ConfigurationError
    from megatron_async.lab.arrival_trace import LengthDistribution

    for name, longest in MEANS.items():
        mean, most = getattr(arguments, name), getattr(arguments, longest)
        if not 1 <= mean <= most <= MOST_TOKENS:
            raise ConfigurationError(
                f"{flag(name)} {mean:g} must be from 1 to {flag(longest)} {most}, which may be at "
                f"most {MOST_TOKENS}."
            )
    sigma = arguments.length_sigma
    if not 0 <= sigma <= 10:
        raise ConfigurationError(f"--length-sigma {sigma:g} must be from 0 to 10.")
    return (
        LengthDistribution(arguments.prompt_mean, arguments.max_prompt_tokens, sigma),
        LengthDistribution(arguments.output_mean, arguments.max_output_tokens, sigma),
    )


def engine_config(
    arguments: argparse.Namespace, lookahead: int, target_tpot_ms: float | None
) -> InferenceConfig:
    """Settings of the engine that serves a trace.

    Raises:
        ConfigurationError: a value out of range.
    """
    from megatron_async.config import DEFAULT_MAX_REQUESTS, InferenceConfig

    longest = arguments.max_prompt_tokens + arguments.max_output_tokens
    options = {name: getattr(arguments, name) for name, *_ in ENGINE_OPTIONS}
    if options["num_kv_blocks"] is None:
        # At most so many blocks are ever needed; a wrong block size is the configuration's to tell.
        blocks = -(-longest // max(options["block_size_tokens"], 1))
        slots = options["max_requests"] or min(DEFAULT_MAX_REQUESTS, options["max_tokens"])
        options["num_kv_blocks"] = max(slots, 1) * blocks
    if chances := arguments.forced_acceptance:
        options |= {"speculative_method": "ngram", "num_speculative_tokens": len(chances)}
    options |= {"lookahead": lookahead, "target_tpot_ms": target_tpot_ms}
    options["late_launch"] = arguments.late_launch if lookahead == 1 else None
    return InferenceConfig(max_sequence_length=longest, **options)


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a recording and say how it went."""
    check_recording("FILE", arguments.file)

    from megatron_async.lab.recording import load_recording
    from megatron_async.lab.replay import Replay, describe_state

    recording = load_recording(arguments.file, allow_truncated=arguments.allow_truncated)
    replay = Replay(recording)
    steps = replay.run(arguments.until_step)
    if arguments.until_step is not None:
        print(describe_state(replay.engine))
    if not recording.is_complete:
        print("The recording has no end: its run crashed, or is still going on.")
    print(f"{steps} steps planned, every one as recorded.")
    return 0
