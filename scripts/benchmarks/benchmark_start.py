#!/usr/bin/env python
"""From exec to the first token, in a process of its own each time, medians of some runs.

    benchmark_start.py dummy:llama-3.1-8b --engine max_requests=256 max_tokens=2048

cold: empty caches. warm: those of the last cold start. prepared: empty ones that
`megatron-async compile` has filled before, which is not timed. The page cache is as it is: run once
before. Seconds: the imports, the phases of `LLM.start_phases`, the first token, and all together.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_async.lab.benchmark_record import write_record

CACHES = ("cold", "warm", "prepared")
PACKAGE = "megatron_async"


def start(model: str, options: dict[str, Any], began: float) -> dict[str, Any]:
    """Start an engine in this process, and generate a token; what each phase took."""
    from triton import knobs

    from megatron_async import LLM, SamplingParams

    imported = time.time() - began
    made: list[tuple[float, str, bool]] = []

    def note(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        made.append((times.total / 1e6, src.name, cache_hit))

    knobs.compilation.listener = note
    with LLM(model, **options) as engine:
        ready = time.time() - began
        engine.generate([1, 2, 3], SamplingParams(num_tokens_to_generate=1))
        first = time.time() - began
        seconds = {"import": imported, **engine.start_phases.seconds, "first token": first - ready}
        ours = sorted((each for each in made if not each[2]), reverse=True)
        return {
            "seconds": {**seconds, "all": first},
            "compiled_here": len(ours),
            "compiled_here_s": sum(each[0] for each in ours),
            "kernels": len(made),
            "slowest": [each[1] for each in ours[:9]],
            "choices": engine.engine.context.choices.records(),
            "modules": len(sys.modules),
        }


def environment_of(folder: Path) -> dict[str, str]:
    """Of a process whose caches are below a folder. Without `.pyc` files imports take three times
    as long: those that are missing are written."""
    other = {"TRITON_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in other}
    return kept | {"MEGATRON_ASYNC_CACHE": str(folder)}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One start in a new process, with its caches below a folder."""
    environment = environment_of(folder)
    command = [sys.executable, __file__, arguments.model, "--engine", *arguments.engine]
    command += ["--child", repr(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(arguments: argparse.Namespace, folder: Path) -> None:
    """What an image would bring along: kernels, and the choices of an earlier start."""
    environment = environment_of(folder)
    command = [sys.executable, "-m", PACKAGE, "compile", arguments.model, "--gpu", arguments.gpu]
    for name, value in engine_options(arguments.engine).items():
        option = {"max_tokens": "max-step-tokens"}.get(name, name.replace("_", "-"))
        command += [f"--{option}", str(value)] if name != "device" else []
    subprocess.run(command, env=environment, check=True)


def engine_options(given: list[str]) -> dict[str, Any]:
    """`name=value`, where a value is JSON or a word."""
    options = {}
    for each in given:
        name, _, text = each.partition("=")
        options[name] = text
        with contextlib.suppress(ValueError):
            options[name] = json.loads(text)
    return options


def median_start(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The last start, with the medians of all."""
    seconds = {
        name: statistics.median(each["seconds"][name] for each in starts)
        for name in starts[0]["seconds"]
    }
    same = all(each["choices"] == starts[0]["choices"] for each in starts)
    return starts[-1] | {"seconds": seconds, "same_choices": same}


def main(given: list[str] | None = None) -> None:
    """Measure, print a line for each kind of caches, and the choices of the last start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--engine", nargs="*", default=[], metavar="NAME=VALUE", help="as LLM's")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--gpu", default="h200", help="for `compile`, as it names GPUs")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.child is not None:
        told = start(arguments.model, engine_options(arguments.engine), arguments.child)
        print("\n" + json.dumps(told))
        return
    figures = []
    with tempfile.TemporaryDirectory() as root:
        kept = Path(root) / "caches"
        for caches in arguments.caches:
            if caches == "warm" and "cold" not in arguments.caches:
                run(arguments, kept)
            starts = []
            for _ in range(arguments.runs):
                if caches != "warm":
                    shutil.rmtree(kept, ignore_errors=True)
                if caches == "prepared":
                    prepare(arguments, kept)
                starts.append(run(arguments, kept))
            found = median_start(starts)
            figures.append({"caches": caches, **found})
            parts = ", ".join(f"{name} {took:.2f}" for name, took in found["seconds"].items())
            print(f"{caches}: {parts}; {found['compiled_here']} of {found['kernels']} kernels made")
            if found["slowest"]:
                print(f"  compiled where they were launched: {', '.join(found['slowest'])}")
            if not found["same_choices"]:
                print("  two starts chose otherwise")
    for row in figures[-1]["choices"]:
        print(json.dumps(row))
    if arguments.json:
        settings = {**vars(arguments), "device": engine_options(arguments.engine).get("device")}
        write_record(arguments.json, "start", settings, figures)


if __name__ == "__main__":
    main()
