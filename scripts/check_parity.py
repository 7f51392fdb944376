"""Does the engine on this device say what a reference says, token for token?

Greedy tokens of the engine under test, at every lookahead and batch size asked for, are compared
with a reference: this engine on one rank, serial (lookahead 0), in float32 on --reference-device,
or `transformers` in float32 (--reference transformers, which needs the dev extra). Both compute
with the weights as --dtype holds them, so what may differ is the arithmetic alone.

Where a request's tokens part from the reference's, the reference's logits are computed again from
the tokens before, which both share. A near tie (megatron_async/lab/divergence.py says how near)
is printed and passes, unless --exact is given. Anything else is a FAIL, and the exit code is 1.

    python scripts/check_parity.py --model smollm2 --device cuda --dtype bfloat16

On several ranks every replica generates for all prompts, and is judged; the reference then runs
alone, in a process after them:

    torchrun --nproc-per-node 4 scripts/check_parity.py --model dummy:llama-3.1-8b --device cuda \
        --dtype bfloat16 --tensor-model-parallel-size 4 --reference-device cuda
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_async import LLM, InferenceConfig
from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.source import DTYPES, parse_dtype
from megatron_async.cli.options import add_parallel, parallel_sizes
from megatron_async.cli.ranks import end_together, gather_replicas, has_other_ranks, is_first_rank
from megatron_async.lab.divergence import Divergence, LogProbDistance, find_divergences
from megatron_async.lab.references import (
    EngineReference,
    Reference,
    TransformersReference,
    generated,
    greedy_params,
)

TEXTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils when it is heated because its molecules move faster and faster, until",
    "List three things that float: ",
    "A",
)
"""Prompts of several lengths, for models with a tokenizer."""
OF_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Beginnings of the environment variables that make a process a rank."""


@dataclass
class Run:
    """What one replica generated at a lookahead for the first `batch_size` prompts."""

    replica: int
    lookahead: int
    batch_size: int
    overlap_ratio: float
    pauses: int
    evictions: int
    tokens: list[list[int]]
    distance: str = ""
    """Of the log probs of its tokens to their scores; of the largest batch."""


@dataclass
class Outcome:
    """A run that was judged."""

    run: Run
    divergences: list[Divergence]

    @property
    def near_ties(self) -> int:
        """Requests that parted from the reference where it was undecided."""
        return sum(divergence.is_near_tie for divergence in self.divergences)

    @property
    def failures(self) -> int:
        """Requests that parted from the reference without such an excuse."""
        return len(self.divergences) - self.near_ties

    @property
    def identical(self) -> int:
        """Requests that did not part from it."""
        return self.run.batch_size - len(self.divergences)


def make_prompts(model_name: str, count: int) -> list[list[int]]:
    """Token ids of `count` prompts of different lengths: text where the model has a tokenizer,
    random ids where it has none."""
    source = open_model(model_name)
    tokenizer = source.tokenizer
    if tokenizer is not None:
        more = [f"{number} plus {number * 7} is" for number in range(count - len(TEXTS))]
        return [list(tokenizer.tokenize(text)) for text in [*TEXTS, *more][:count]]
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + 37 * number % 96 for number in range(count)]
    vocabulary = source.architecture.vocab_size
    return [
        [int(token) for token in torch.randint(vocabulary, (length,), generator=generator)]
        for length in lengths
    ]


def engine_settings(prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Of the engine under test and of the reference: room for all prompts at once."""
    longest = max(map(len, prompts)) + args.tokens
    return {
        "block_size_tokens": args.block_size_tokens,
        "max_sequence_length": longest,
        "max_requests": len(prompts),
        "max_tokens": max(2048, len(prompts)),
        "num_kv_blocks": len(prompts) * -(-longest // args.block_size_tokens),
    }


def run_engine(prompts: list[list[int]], args: argparse.Namespace) -> list[Run]:
    """Generate at each lookahead and batch size; every rank of a job calls it.

    Returns:
        the runs of all replicas; on ranks other than the first, nothing that counts.
    """
    settings = engine_settings(prompts, args)
    if args.num_kv_blocks:
        settings["num_kv_blocks"] = args.num_kv_blocks
    runs: list[Run] = []
    with LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        transformer_impl=args.transformer_impl,
        lookahead=max(args.lookahead),
        check_ranks_agree=True,
        **parallel_sizes(args),
        **settings,
    ) as llm:
        engine = llm.engine
        for lookahead in args.lookahead:
            for size in args.batch_sizes:
                # The engine is idle, and its buffers are made for the largest lookahead asked for.
                engine.loop.lookahead = lookahead
                counted, before = deepcopy(engine.statistics), engine.stats()
                requests = llm.generate(prompts[:size], greedy_params(args.tokens))
                after = engine.stats()
                runs.append(
                    Run(
                        replica=llm.data_parallel_rank,
                        lookahead=lookahead,
                        batch_size=size,
                        overlap_ratio=engine.statistics.overlap_ratio_since(counted),
                        pauses=int(after["pauses"] - before["pauses"]),
                        evictions=int(after["evictions"] - before["evictions"]),
                        tokens=generated(requests),
                        distance=score_distance(llm, prompts, args)
                        if size == max(args.batch_sizes)
                        else "",
                    )
                )
        mine = {"runs": [asdict(run) for run in runs]}
        found = [Run(**run) for part in gather_replicas(llm, mine) for run in part["runs"]]
        end_together()
    return found


def score_distance(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> str:
    """How far the log probs of generated tokens are from the scores of the same tokens."""
    params = greedy_params(args.tokens)
    params.return_log_probs = params.skip_prompt_log_probs = True
    requests = llm.generate(prompts[: max(args.batch_sizes)], params)
    whole = [[*each.prompt_tokens.tolist(), *each.generated_tokens] for each in requests]
    scores = llm.score(whole, [len(each.prompt_tokens) for each in requests])
    generated_ones = [value for each in requests for value in each.generated_log_probs or ()]
    scored = [value for each in scores for value in each.prompt_log_probs or ()]
    return str(LogProbDistance.of(generated_ones, scored))


def make_reference(prompts: list[list[int]], args: argparse.Namespace) -> Reference:
    """The reference that is asked for."""
    dtype = parse_dtype(args.dtype)
    if args.reference == "transformers":
        return TransformersReference(args.model, args.reference_device, dtype)
    config = InferenceConfig(
        device=args.reference_device, lookahead=0, **engine_settings(prompts, args)
    )
    return EngineReference(args.model, args.reference_device, dtype, config)


def judge(runs: list[Run], prompts: list[list[int]], args: argparse.Namespace) -> int:
    """Compare, print a table, write --json; returns the number of failures."""
    reference = make_reference(prompts, args)
    expected = reference.greedy(prompts, args.tokens)
    dtype = parse_dtype(args.dtype)
    num_blocks = len(open_model(args.model).architecture.pattern)
    print(
        f"{args.model}, {args.dtype} on {args.device}; reference: {args.reference}, float32 on "
        f"{args.reference_device}; {args.tokens} tokens"
    )
    print("replica  lookahead  batch  identical  near ties  FAIL  overlap  pauses  evictions")
    outcomes = []
    for run in runs:
        size = run.batch_size
        differing = find_divergences(
            prompts[:size], expected[:size], run.tokens, reference, dtype, num_blocks
        )
        outcome = Outcome(run, differing)
        outcomes.append(outcome)
        print(
            f"{run.replica:7}{run.lookahead:11}{size:7}{outcome.identical:11}"
            f"{outcome.near_ties:11}{outcome.failures:6}{run.overlap_ratio:9.2f}{run.pauses:8}"
            f"{run.evictions:11}"
        )
    for run in runs:
        if run.distance:
            print(
                f"replica {run.replica}, lookahead {run.lookahead}: log probs of scores and of "
                f"generation differ by {run.distance}"
            )
    for outcome in outcomes:
        where = f"replica {outcome.run.replica}, lookahead {outcome.run.lookahead}"
        for divergence in outcome.divergences:
            print(f"{where}, batch {outcome.run.batch_size}, {divergence}")
    failed = sum(
        len(outcome.divergences) if args.exact else outcome.failures for outcome in outcomes
    )
    if args.json:
        found = [asdict(outcome) | {"identical": outcome.identical} for outcome in outcomes]
        report = {"settings": vars(args), "failed": failed, "outcomes": found}
        Path(args.json).write_text(json.dumps(report, indent=1))
    print("FAIL" if failed else "OK")
    return failed


def judge_alone(runs: list[Run], arguments: Sequence[str]) -> int:
    """`judge` in a process that is no rank; returns its exit code."""
    sys.stdout.flush()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        file.write_text(json.dumps([asdict(run) for run in runs]))
        command = [sys.executable, __file__, *arguments, "--judge", str(file)]
        return subprocess.run(command, env=environment, check=False).returncode


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, every default filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="anything that LLM loads")
    parser.add_argument("--device", default="cpu", help="of the engine under test")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--transformer-impl", default="local", help="of the engine under test")
    parser.add_argument("--reference", choices=["engine", "transformers"], default="engine")
    parser.add_argument("--reference-device", default="cpu")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens a request")
    parser.add_argument("--block-size-tokens", type=int, default=64)
    parser.add_argument(
        "--num-kv-blocks",
        type=int,
        help="pool of the engine under test; default: room for all, fewer make it pause and evict",
    )
    parser.add_argument("--exact", action="store_true", help="near ties fail too")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes there")
    parser.add_argument(
        "--judge",
        metavar="FILE",
        help="judge the runs in this file, with the options that made them, and start no engine",
    )
    add_parallel(parser)
    args = parser.parse_args(arguments)
    if min(args.batch_sizes) < 1 or min(args.lookahead) < 0 or args.tokens < 1:
        parser.error("batch sizes and tokens start at 1, lookahead at 0")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; exit code 1 if anything failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse_arguments(arguments)
    prompts = make_prompts(args.model, max(args.batch_sizes))
    if args.judge:
        runs = [Run(**run) for run in json.loads(Path(args.judge).read_text())]
    else:
        runs = run_engine(prompts, args)
        if has_other_ranks():
            return judge_alone(runs, arguments) if is_first_rank() else 0
    return 1 if judge(runs, prompts, args) else 0


if __name__ == "__main__":
    sys.exit(main())
