"""What looked-up drafts are worth where the answer is an edit of the prompt.

With --edit BEFORE AFTER the prompt is a file before a real edit, and the answer is the file after
the edit. The answer is forced on the model (`megatron_async/profiling/forced_text.py`), so random
weights serve too. Without --edit the model answers freely the prompts of --prompts FILE, a JSON
object of texts by name (default: `texts/edits_and_questions.json`), and ends its answers itself.
Decode alone is timed, from the first token of an answer to its last. Engines with and without
drafts take turns.

    git show REV^:FILE > before.py; git show REV:FILE > after.py
    python scripts/benchmarks/benchmark_edits.py --models dummy:llama-3.1-8b \\
        --edit before.py after.py
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.registry import open_model
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.profiling.forced_text import ForcedText
from megatron_async.text.tokenizer import TOKENIZER, Tokenizer

PROMPTS = Path(__file__).with_name("texts") / "edits_and_questions.json"
INSTRUCTION = "Rewrite this file with the change that was discussed.\n\n"


@dataclass(frozen=True)
class Task:
    """A prompt, and the answer that is forced, or how long it may be.

    Attributes:
        name: for the table.
        prompt, answer: token ids; no answer: the model's own.
        tokens: of the answer, at most.
    """

    name: str
    prompt: list[int]
    answer: list[int]
    tokens: int


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """What is to be answered, in tokens of --tokenizer."""
    is_folder = Path(args.tokenizer, TOKENIZER).is_file()
    tokenizer = (
        Tokenizer.from_folder(args.tokenizer) if is_folder else open_model(args.tokenizer).tokenizer
    )
    assert tokenizer is not None, "dummy models have none"
    found = []
    for before, after in args.edit:
        prompt = tokenizer.tokenize(INSTRUCTION + Path(before).read_text())
        answer = tokenizer.tokenize(Path(after).read_text(), add_special_tokens=False)
        found.append(Task(Path(after).name, prompt, answer, len(answer)))
    texts = {} if args.edit else json.loads(args.prompts.read_text())
    for name, text in texts.items():
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        prompt = tokenizer.tokenize(chat, add_special_tokens=False)
        found.append(Task(name, prompt, [], args.answer_tokens))
    return found


def timed(llm: LLM, task: Task, temperature: float) -> tuple[float, float, list[int]]:
    """Tokens a second and tokens a step of one answer, and the answer."""
    params = SamplingParams(
        num_tokens_to_generate=task.tokens, temperature=temperature, seed=1,
        termination_id=-1 if task.answer else None,
    )  # fmt: skip
    steps = llm.engine.statistics.resolved_steps
    request = llm.generate([task.prompt], params)[0]
    if request.error is not None:
        raise request.error
    steps = llm.engine.statistics.resolved_steps - steps
    assert request.ttft is not None, "it is over"
    assert request.latency is not None, "it is over"
    count = len(request.generated_tokens)
    return (count - 1) / (request.latency - request.ttft), count / steps, request.generated_tokens


def measure(model: str, tasks: Sequence[Task], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of figures for each task."""
    longest = max(len(task.prompt) + task.tokens for task in tasks)
    options = {
        "device": args.device, "dtype": args.dtype, "max_requests": 1, "lookahead": args.lookahead,
        "max_sequence_length": longest + 8, "block_size_tokens": 64,
        "num_kv_blocks": longest // 64 + 2, "enable_prefix_caching": False,
    }  # fmt: skip
    drafting = {"speculative_method": args.speculative_method}
    drafting |= {"num_speculative_tokens": args.num_speculative_tokens}
    figures: list[dict[str, Any]] = []
    with ExitStack() as stack:
        plain, drafts = (
            stack.enter_context(LLM(model, **options, **more)) for more in ({}, drafting)
        )
        forced = [ForcedText(llm.engine) for llm in (plain, drafts)] if args.edit else []
        for task in tasks:
            for text in forced:
                text.say([*task.prompt, *task.answer])
            rounds = [[timed(llm, task, args.temperature) for llm in (plain, drafts)]
                      for _ in range(args.rounds + 1)][1:]  # fmt: skip
            if task.answer and any(a != task.answer for each in rounds for *_, a in each):
                raise RuntimeError(f"{task.name}: the forced answer did not come out")
            speeds = [statistics.median(each[n][0] for each in rounds) for n in (0, 1)]
            figures.append(
                {
                    "model": model, "task": task.name, "prompt": len(task.prompt),
                    "tokens": len(rounds[0][0][2]), "plain": speeds[0], "drafts": speeds[1],
                    "ratio": speeds[1] / speeds[0], "a_step": rounds[0][1][1],
                }
            )  # fmt: skip
            print("{model:<22}{task:<28}{prompt:>8}{tokens:>8}{plain:>12.1f}{drafts:>12.1f}"
                  "{ratio:>8.2f}{a_step:>8.2f}".format(**figures[-1]), flush=True)  # fmt: skip
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument(
        "--tokenizer",
        default="smollm2",
        help="a folder with tokenizer.json, or a model that has one",
    )
    parser.add_argument("--edit", nargs=2, action="append", default=[], metavar="FILE")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON object of texts")
    parser.add_argument("--answer-tokens", type=int, default=256, help="at most, with --prompts")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculative-method", default="ngram")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    print(f"{'model':<22}{'task':<28}{'prompt':>8}{'tokens':>8}{'plain t/s':>12}{'drafts t/s':>12}"
          f"{'ratio':>8}{'a step':>8}")  # fmt: skip
    tasks = tasks_of(args)
    figures = [row for model in args.models for row in measure(model, tasks, args)]
    if args.json:
        write_record(args.json, "edits", vars(args) | {"prompts": str(args.prompts)}, figures)


if __name__ == "__main__":
    main()
