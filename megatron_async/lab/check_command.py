"""`megatron-async check`: does a request's answer depend on the company that it is served in?"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.files import check_writable
from megatron_async.cli.options import (
    FIGURES,
    LAYERS,
    MODEL_HELP,
    NO_PROGRESS,
    PROGRAM,
    Rows,
    add_engine_options,
    add_parallel,
    add_rows,
    engine_options,
    parallel_sizes,
)
from megatron_async.cli.parser import add_model, take_model
from megatron_async.cli.ranks import end_together, is_first_rank
from megatron_async.cli.terminal import importing_engine

CASES = {
    "batch": "2, 4, ... rows (at most --max-requests), the others random requests",
    "idle": "replicas that share experts in turn, while the others have nothing to serve",
    "order": "the rows of a batch in another order",
    "chunks": "prompts in chunks, by small budgets of a step",
    "warm": "beginnings found in the prefix cache, with states of recurrent layers",
    "lookahead": "0, 1 and 2",
    "paused": "the engine pauses every few steps",
    "suspended": "the engine frees its KV cache once and takes it again",
    "evicted": "a small pool: requests lose their blocks and are prefilled again",
    "drafts": "ngram, and mtp where the model has it",
}
MOST_NEEDLES = 10_000
"""All are made before the first is served."""
WHAT: Rows = (
    ("-p --prompt", list, "TEXT", None,
     "a needle; may be repeated (default: random token ids of several lengths)"),
    ("--needles", int, "N", 3, "random needles; the first 64 are served alone"),
    ("--tokens", int, "N", None, "that each needle generates (default: 16 on a CPU, else 128)"),
    ("--cases", [str], "NAME", list(CASES), "ways to serve them, see below"),
    ("--seed", int, "N", 0, "of the needles and their company"),
)  # fmt: skip


def add_check(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `check`."""
    cases = "\n".join(f"  {name:<10} {text}" for name, text in CASES.items())
    check = commands.add_parser(
        "check",
        run=run_check,
        parents=[common],
        help="does an answer depend on what it is served with?",
        description="Serve the same prompts, the needles, alone and in many other ways, and\n"
        "compare tokens and the bits of log probs. A difference that the engine's mode does not\n"
        "allow is named by needle, token and layer, and the exit status is 1.",
        epilog=f"""cases:
{cases}

examples:
  {PROGRAM} check smollm2
  {PROGRAM} check ./my-llama --cases batch warm --max-requests 64 --json check.json""",
    )
    what = check.add_argument_group("what to check")
    add_model(what, MODEL_HELP)
    add_rows(what, WHAT)
    add_rows(add_engine_options(check), [LAYERS])
    add_parallel(check, "check")
    add_rows(check.add_argument_group("output"), [FIGURES, NO_PROGRESS])


def run_check(arguments: argparse.Namespace) -> int:
    """Serve, compare, print; 1 if an answer differs as the mode does not allow.

    Raises:
        ValueError: a number out of range, an unknown case, none that the model and the settings
            have, or drafts among the engine's options.
    """
    model, sizes = take_model(arguments), parallel_sizes(arguments)
    options = engine_options(arguments)
    for name, least in ("needles", 1), ("tokens", 2), ("seed", 0):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise ValueError(f"--{name} {value} must be at least {least}.")
    if arguments.needles > MOST_NEEDLES:
        raise ValueError(f"--needles {arguments.needles} must be at most {MOST_NEEDLES:,}.")
    if unknown := [case for case in arguments.cases if case not in CASES]:
        raise ValueError(f"--cases {unknown[0]} is none: the cases are {', '.join(CASES)}.")
    if drafts := {"speculative_method", "num_speculative_tokens"} & options.keys():
        raise ValueError(f"--{min(drafts).replace('_', '-')}: drafts are a case; leave it out.")
    check_early(model, options, sizes)
    if arguments.json is not None:
        check_writable("--json", arguments.json)

    with importing_engine():
        from megatron_async.lab.benchmark_record import write_record
        from megatron_async.lab.check_outcomes import PROMISES, explained, line
        from megatron_async.lab.check_run import serve_cases

    replicas, mode, digest = serve_cases(arguments, model, sizes, options)
    found = [case for replica in replicas for case in replica]
    failed = any(case["failed"] for case in found)
    if is_first_rank():
        for case in found[len(replicas[0]) :]:  # the first one's are there
            print(line(case, True))
        places, tokens, differ = (
            sum(case[key] for case in found) for key in ("log_probs", "tokens", "differ")
        )
        print(f"{places:,} log probs and {tokens:,} tokens compared; {differ:,} log probs differ")
        print(f"digest of the first answers: {digest}")
        told = [case for case in found if case["failed"] or case["parted"]]
        told = told or [case for case in found if case["differ"]][:1]
        print("\n".join([*map(explained, told), PROMISES[mode], "FAIL" if failed else "OK"]))
        if arguments.json is not None:
            settings = {k: v for k, v in vars(arguments).items() if k != "run"}
            settings |= {"mode": mode, "digest": digest}
            write_record(arguments.json, "check", settings, found)
    end_together()
    return 1 if failed else 0
