"""Run Megatron-LM's own inference examples and public tests on this engine, unmodified.

    python scripts/run_upstream.py CHECKOUT --cpu

Examples run on a checkpoint that is made here, and must give the tokens of `LLM`. Test files run
twice, on Megatron's own code and with the import hook; a test that passes there and not here, and
is not on the list in scripts/upstream/public_tests.py, makes the exit status 1, as does a wrong or
failed example. Nothing is written into the checkout. Megatron's tests need msgpack and
pytest-asyncio (`pip install --target DIR`, with DIR on PYTHONPATH). A checkout of main brings its
own megatron-core: put it on PYTHONPATH, too.
"""

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
from megatron import core
from upstream.file_runs import TIMEOUT, Comparison, lost_tests, table
from upstream.public_tests import DATA, FOLDER, ON_A_GPU, OUT, OWN, PUBLIC, unlisted


def main() -> int:
    """Run what was asked for; the exit status is 0 if nothing is lost."""
    options = _options()
    checkout = options.checkout.resolve()
    if not (checkout / FOLDER).is_dir():
        print(f"{checkout}: no checkout of Megatron-LM ({FOLDER} is missing)", file=sys.stderr)
        return 2
    if not torch.cuda.is_available() and not options.cpu:
        print("no GPU here: add --cpu for stand-ins of what scripts ask CUDA for", file=sys.stderr)
        return 2
    print(
        f"{checkout}; megatron-core {core.__version__}, torch {torch.__version__}, "
        f"{platform.machine()}, {'CPU' if options.cpu else torch.cuda.get_device_name()}"
    )
    wrong = []
    if "examples" in options.only:
        wrong += run_examples(checkout, options)
    if "tests" in options.only:
        wrong += run_tests(checkout, options)
    print(f"\n{len(wrong)} lost" + "".join(f"\n  {line}" for line in wrong))
    return 1 if wrong else 0


def run_examples(checkout: Path, options: argparse.Namespace) -> list[str]:
    """Run the examples on a checkpoint of `options.model`, and print a line for each; what is
    wrong."""
    from upstream.example_runs import (
        EXAMPLES,
        NOT_RUN,
        SERVERS,
        differences,
        reference,
        run_example,
        run_server,
    )
    from upstream.training_checkpoint import model_flags, write_training_folder

    wrong, passed = [], 0
    expected = reference(options.model, "cpu" if options.cpu else "cuda")
    with tempfile.TemporaryDirectory() as place:
        folder, flags = Path(place) / "checkpoint", model_flags(options.model)
        write_training_folder(options.model, folder)
        chosen = [n for n, e in enumerate(EXAMPLES) if options.match in e.name]
        for number in chosen:
            example, start = EXAMPLES[number], time.monotonic()
            answers, said = run_example(
                checkout, example, folder, flags, options.cpu, options.timeout
            )
            found = [said] if said else differences(example, answers, expected[number])
            passed += not found
            seconds = time.monotonic() - start
            print(f"{verdict(found)}  {seconds:4.0f} s  {example.name}", flush=True)
            wrong += [f"{example.name}: {line}" for line in found]
        for script in (script for script in SERVERS if options.match in script):
            texts = [one.text for one in expected[0]]
            found = run_server(checkout, script, folder, flags, options.cpu, options.timeout, texts)
            print(f"{verdict(found)}  by HTTP  {script}", flush=True)
            wrong += [f"{script}: {line}" for line in found]
    print(f"examples: {passed} of {len(chosen)} runs have the tokens of LLM({options.model!r})")
    print(f"not run, {len(NOT_RUN)}:")
    for script, reason in NOT_RUN.items():
        print(f"  {script}: {reason}")
    return wrong


def verdict(found: list[str]) -> str:
    """One word for a run with these faults, and the first of them behind it."""
    if not found:
        return "equal"
    why = found[0].splitlines()
    said = f" ({why[0].removeprefix(TIMEOUT)}; {why[-1]})" if len(why) > 1 else f" ({why[0]})"
    return ("timeout" if found[0].startswith(TIMEOUT) else "wrong") + said


def run_tests(checkout: Path, options: argparse.Namespace) -> list[str]:
    """Run the public tests twice, and print the table; those that pass with Megatron's own code
    only, and are not on the list."""
    from upstream.file_runs import compare_file

    files = PUBLIC | ({} if options.cpu else ON_A_GPU)
    comparisons: list[Comparison] = []
    for number, (name, (_, listed)) in enumerate(files.items(), 1):
        if options.match not in name or not (checkout / FOLDER / name).is_file():
            continue
        start = time.monotonic()
        one = compare_file(checkout, FOLDER + name, listed, options.cpu, options.timeout)
        comparisons.append(one)
        print(f"{number}/{len(files)} {time.monotonic() - start:4.0f} s  {one.row}", flush=True)
    print(f"\n{table(comparisons)}\n")
    by_kind = {kind: [n for n, (k, _) in files.items() if k == kind] for kind in (DATA, OWN)}
    print(
        "With the hook, these exercise the very classes of Megatron, which is what they show:\n"
        f"  {DATA}: {', '.join(by_kind[DATA])}\n  {OWN}: {', '.join(by_kind[OWN])}\n"
        "What the engine does is shown by the examples and by the other files."
    )
    for one in comparisons:
        for test in one.left_out:
            passes = " (passes all the same)" if one.ours.get(test) == "" else ""
            print(f"on the list: {test}: {one.reason(test)}{passes}")
    if options.cpu:
        print(f"not run without a GPU: {', '.join(ON_A_GPU)}")
    print(f"files out, {len(OUT)}:")
    for name, reason in OUT.items():
        print(f"  {name}: {reason}")
    there = (checkout / FOLDER).rglob("test_*.py")
    new = unlisted([path.relative_to(checkout / FOLDER).as_posix() for path in there])
    if new:
        print(f"not known to this script, so not run: {', '.join(new)}")
    return lost_tests(comparisons)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of Megatron-LM (0.19 or main)")
    parser.add_argument("--cpu", action="store_true", help="stand-ins for a machine without a GPU")
    parser.add_argument(
        "--model", default="smollm2", help="of the examples: dense, with a tokenizer (smollm2)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=["examples", "tests"], default=["examples", "tests"]
    )
    parser.add_argument("--match", default="", help="run only what has this text in its name")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run (600)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
