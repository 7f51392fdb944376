"""`megatron-async check`: does a request's answer depend on the company that it is served in?"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

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
from megatron_async.cli.prompts import token_ids
from megatron_async.cli.ranks import end_together, gather_replicas, has_other_ranks, is_first_rank
from megatron_async.cli.terminal import importing_engine, raise_interrupts

if TYPE_CHECKING:
    from megatron_async.lab.check_cases import NeedleServer, Variant
    from megatron_async.lab.check_outcomes import Difference, Judge
    from megatron_async.llm import LLM

CASES = ("batch", "order", "chunks", "warm", "lookahead", "paused", "evicted", "drafts")
PROBED = 3
"""Cases that fail whose layers are looked for; each serves the needle twice more."""
ON_CPU = {"max_requests": 16, "block_size_tokens": 16, "longest": 72, "tokens": 24}
ON_GPU = {"max_requests": 256, "block_size_tokens": 64, "longest": 1200, "tokens": 128}
"""What is not said, by device."""
LEAST_RECURRENT = 160
"""Of a model with recurrent layers: states are kept at multiples of 128 tokens."""
MOST_WIDTH = 4
"""Query tokens of a row with drafts."""
LEAST_GB = 1e-9
"""Of paused requests: those that are short of blocks are evicted at once."""
WHAT: Rows = (
    ("-p --prompt", list, "TEXT", None,
     "a needle; may be repeated (default: random token ids of several lengths)"),
    ("--needles", int, "N", 3, "random needles"),
    ("--tokens", int, "N", None, "that each needle generates (default: 24 on a CPU, else 128)"),
    ("--cases", [str], "NAME", list(CASES), "ways to serve them, see below"),
    ("--seed", int, "N", 0, "of the needles and their company"),
)  # fmt: skip


def add_check(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `check`."""
    check = commands.add_parser(
        "check",
        run=run_check,
        parents=[common],
        help="does an answer depend on what it is served with?",
        description="Serve the same prompts, the needles, alone and in many other ways, and\n"
        "compare tokens and the bits of log probs. A difference that the engine's mode does not\n"
        "allow is named by needle, token and layer, and the exit status is 1.",
        epilog=f"""cases:
  batch      2, 4, ... rows (at most --max-requests), the others random requests
  order      the rows of a batch in another order
  chunks     prompts in chunks, by small budgets of a step
  warm       beginnings found in the prefix cache, with states of recurrent layers
  lookahead  0, 1 and 2
  paused     the engine pauses every few steps
  evicted    a small pool: requests lose their blocks and are prefilled again
  drafts     ngram, and mtp where the model has it

examples:
  {PROGRAM} check smollm2
  {PROGRAM} check ./my-llama --cases batch warm --max-requests 64 --json check.json
  torchrun --nproc-per-node 2 -m megatron_async check MODEL --tensor-model-parallel-size 2""",
    )
    what = check.add_argument_group("what to check")
    add_model(what, MODEL_HELP)
    add_rows(what, WHAT)
    add_rows(add_engine_options(check), [LAYERS])
    add_parallel(check, "check")
    add_rows(check.add_argument_group("output"), [FIGURES, NO_PROGRESS])


def run_check(arguments: argparse.Namespace) -> int:
    """Serve, compare, print the table.

    Returns:
        1 if an answer differs as the mode does not allow.

    Raises:
        ValueError: a number out of range, an unknown case, or drafts among the engine's options.
    """
    model, sizes, options = (
        take_model(arguments),
        parallel_sizes(arguments),
        engine_options(arguments),
    )
    for name, least in ("needles", 1), ("tokens", 1), ("seed", 0):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise ValueError(f"--{name} {value} must be at least {least}.")
    if unknown := [case for case in arguments.cases if case not in CASES]:
        raise ValueError(f"--cases {unknown[0]} is none: the cases are {', '.join(CASES)}.")
    if "speculative_method" in options or "num_speculative_tokens" in options:
        raise ValueError("check drafts in a case of its own: leave the options of drafts out.")
    check_early(model, options, sizes)
    if arguments.json is not None:
        check_writable("--json", arguments.json)

    with importing_engine():
        from megatron_async.lab.check_outcomes import PROMISES, Outcome, head

    replicas, mode = serve_cases(arguments, model, sizes, options)
    found = [Outcome(**each) for replica in replicas for each in replica]
    failed = any(each.failed for each in found)
    if is_first_rank():
        if has_other_ranks():
            print("\n".join([head(), *(each.line(len(replicas) > 1) for each in found)]))
        said = [each for each in found if each.failed or each.parted]
        said = said or [each for each in found if each.first][:1]
        print(
            "\n".join([*map(Outcome.explained, said), PROMISES[mode], "FAIL" if failed else "OK"])
        )
        if arguments.json is not None:
            from megatron_async.lab.benchmark_record import write_record

            settings = {k: v for k, v in vars(arguments).items() if k != "run"} | {"mode": mode}
            write_record(arguments.json, "check", settings, [each.plain() for each in found])
    end_together()
    return 1 if failed else 0


def serve_cases(
    arguments: argparse.Namespace, model: str, sizes: dict[str, Any], options: dict[str, Any]
) -> tuple[list[list[dict[str, Any]]], str]:
    """Serve all cases; every rank of a job calls it.

    Returns:
        the outcomes of each replica, as plain values, and the engine's mode.
    """
    from tqdm import tqdm

    from megatron_async.checkpoints import open_model
    from megatron_async.checkpoints.registry import shipped_draft_layer
    from megatron_async.devices import resolve_device_name
    from megatron_async.lab.check_cases import ALONE, Answer, NeedleServer, variants
    from megatron_async.lab.check_outcomes import Outcome, head
    from megatron_async.llm import LLM

    source = open_model(model)
    on_cpu = resolve_device_name(options.get("device")).startswith("cpu")
    defaults = dict(ON_CPU if on_cpu else ON_GPU)
    is_recurrent = any(kind in source.architecture.pattern for kind in "MG")
    tokens, longest = arguments.tokens or defaults.pop("tokens"), defaults.pop("longest")
    longest = max(longest, LEAST_RECURRENT) if is_recurrent else longest
    needles = given_needles(arguments.prompt, source.tokenizer)
    needles = needles or random_needles(
        arguments.needles, longest, source.architecture.vocab_size, arguments.seed
    )
    options = engine_settings(options, defaults, max(map(len, needles)), tokens)
    own = options["lookahead"]
    has_mtp = source.architecture.mtp_num_depths or shipped_draft_layer(model)
    methods = ["ngram", *(["mtp"] if has_mtp else [])]
    plan = variants(options, max(map(len, needles)), methods, arguments.cases)
    progress = not arguments.no_progress and is_first_rank()
    alone, outcomes, probed = list[Answer](), list[Outcome](), 0
    bar = tqdm(
        total=len(plan) + 1, unit="case", disable=None if progress else True, leave=False,
        file=sys.stderr,
    )  # fmt: skip

    def on_step(report: dict[str, Any]) -> None:
        bar.set_postfix_str(f"{len(report['active_request_ids'])} rows", refresh=False)
        bar.update(0)

    with bar:
        for method in dict.fromkeys([None, *(each.method for each in plan)]):
            gc.collect()  # an engine before this one
            with LLM(
                model, dtype=arguments.dtype, transformer_impl=arguments.transformer_impl,
                speculative_method=method, **sizes, **options | {"lookahead": max(own, 2)},
            ) as llm:  # fmt: skip
                raise_interrupts()
                server = NeedleServer(llm, needles, tokens, arguments.seed, own, on_step)
                if method is None:
                    judge = judge_of(llm, len(source.architecture.pattern))
                    bar.set_description("alone")
                    alone = server.serve(ALONE)
                    bar.update()
                    if not has_other_ranks():
                        bar.write(head(), file=sys.stdout)
                for variant in [each for each in plan if each.method == method]:
                    bar.set_description(variant.label)
                    found, happened = server.serve(variant), server.happened()
                    outcome = Outcome.of(variant, alone, found, judge, happened)
                    outcome.replica = llm.data_parallel_rank
                    if outcome.failure is not None and probed < PROBED and not has_other_ranks():
                        probed += 1
                        bar.set_description(f"{variant.label}: layers")
                        outcome.layer = layer_of(server, variant, outcome.failure, judge)
                    outcomes.append(outcome)
                    bar.update()
                    if not has_other_ranks():
                        bar.write(outcome.line(), file=sys.stdout)
        mine = {"alone": alone, "outcomes": [each.plain() for each in outcomes]}
        mine["alone"] = [asdict(each) for each in alone]
        replicas = gather_replicas(llm, mine)
    first, *others = ([Answer(**each) for each in replica["alone"]] for replica in replicas)
    for number, other in enumerate(others, 1):
        outcome = Outcome.of(replace(ALONE, label="replica 0"), first, other, judge, "")
        outcome.replica = number
        replicas[number]["outcomes"].append(outcome.plain())
    return [replica["outcomes"] for replica in replicas], judge.mode


def engine_settings(
    given: Mapping[str, Any], defaults: Mapping[str, Any], longest: int, tokens: int
) -> dict[str, Any]:
    """Settings of the engine: those given, and room for the needles and their company."""
    options = {**defaults, "lookahead": 1, "paused_buffer_size_gb": LEAST_GB, **given}
    requests, size = options["max_requests"], options["block_size_tokens"]
    length = longest + 2 * tokens + size
    options.setdefault("max_sequence_length", length)
    options.setdefault("max_tokens", max(2048, MOST_WIDTH * requests))
    if "buffer_size_gb" not in options:
        options.setdefault("num_kv_blocks", requests * -(-length // size))
    return options


def given_needles(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts on the command line."""
    if tokenizer is None:
        return [token_ids(prompt) for prompt in prompts]
    return [list(tokenizer.tokenize(prompt)) for prompt in prompts]


def random_needles(count: int, longest: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids, the first needle the longest and the others shorter and shorter."""
    import numpy as np

    draws = np.random.default_rng(seed)
    lengths = [max(int(longest * 0.4**number), 5 + number) for number in range(count)]
    return [draws.integers(vocabulary, size=length).tolist() for length in lengths]


def judge_of(llm: LLM, num_blocks: int) -> Judge:
    """What an engine promises, and the rounding of its dtype."""
    import torch

    from megatron_async.lab.check_outcomes import Judge

    config, dtype, mode = llm.engine.context.config, llm.dtype, "fast"
    if config.quantization is not None:
        dtype = torch.bfloat16  # 8-bit activations round no better
    elif dtype == torch.float32:
        mode = "float32"
    if getattr(config, "batch_invariant_mode", False):
        mode = "bits"
    return Judge(mode, dtype, num_blocks)


def layer_of(server: NeedleServer, variant: Variant, failure: Difference, judge: Judge) -> str:
    """Where hidden states of a needle part, in words: it is served alone and by the variant once
    more, and the layers are watched."""
    from megatron_async.lab.check_cases import ALONE
    from megatron_async.lab.check_probe import LayerProbe

    prompt = server.needles[failure.needle]
    end = failure.position + (0 if failure.what == "prompt token" else len(prompt))
    probes = []
    for way in (ALONE, variant):
        probe = LayerProbe(server.llm.engine, prompt, end)
        with probe.watching():
            server.serve(way, failure.needle)
        probes.append(probe)
    return probes[0].first_difference(probes[1], judge.mode == "bits", judge.dtype)
