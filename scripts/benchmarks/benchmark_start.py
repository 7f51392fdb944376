#!/usr/bin/env python
"""From exec to the first token, in a process of its own each time, medians of some runs.

    benchmark_start.py dummy:llama-3.1-8b --engine max_requests=256 max_tokens=2048

cold: empty caches. warm: those of the last cold start. prepared: empty ones that
`megatron-async compile` has filled before, which is not timed. The page cache is as it is: run once
before. Phases in seconds: import, build (the model without weights), read, compile (waited for),
context (with what it measures), capture, first token; what is left is the rest.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_async.lab.benchmark_record import write_record

CACHES = ("cold", "warm", "prepared")
PHASES = ("import", "build", "read", "compile", "context", "capture", "token")
PACKAGE = "megatron_async"


def start(model: str, options: dict[str, Any], began: float) -> dict[str, Any]:
    """Start an engine in this process, and generate a token; what each phase took."""
    from megatron_async import llm
    from megatron_async.ops.compile_kernels import KernelStart, compilations
    from megatron_async.requests.sampling_params import SamplingParams
    from megatron_async.step.text_generation_controller import TextGenerationController

    seconds = dict.fromkeys(PHASES, 0.0) | {"import": time.time() - began}

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[phase] += time.perf_counter() - begin

        return call

    def opened(*args: Any) -> Any:
        source = open_model(*args)
        source.load_weights = timed("read", source.load_weights)  # type: ignore[method-assign]
        return source

    open_model = llm.open_model
    changes: list[tuple[Any, str, Any]] = [
        (llm, "open_model", opened),
        (llm, "build_model", timed("build", llm.build_model)),
        (llm, "DynamicInferenceContext", timed("context", llm.DynamicInferenceContext)),
        (KernelStart, "join", timed("compile", KernelStart.join)),
        (TextGenerationController, "create_cuda_graphs",
         timed("capture", TextGenerationController.create_cuda_graphs)),
    ]  # fmt: skip
    for owner, name, function in changes:
        setattr(owner, name, function)
    made = compilations()
    with llm.LLM(model, **options) as engine:
        ready = time.time() - began
        timed("token", engine.generate)([1, 2, 3], SamplingParams(num_tokens_to_generate=1))
        first = time.time() - began
        ours = [each for each in made.all if not each.was_kept]
        return {
            "seconds": {**seconds, "ready": ready, "first_token": first},
            "compiled_here": len(ours),
            "compiled_here_s": sum(each.seconds for each in ours),
            "kernels": len(made.all),
            "slowest": [each.name for each in sorted(ours, key=lambda each: -each.seconds)[:9]],
            "choices": engine.engine.context.choices.records(),
            "modules": len(sys.modules),
        }


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One start in a new process, with its caches below a folder."""
    environment = os.environ | {"MEGATRON_ASYNC_CACHE": str(folder)}
    environment.pop("TRITON_CACHE_DIR", None)
    command = [sys.executable, __file__, arguments.model, "--engine", *arguments.engine]
    command += ["--child", repr(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(arguments: argparse.Namespace, folder: Path) -> None:
    """What an image would bring along: kernels, and the choices of an earlier start."""
    environment = os.environ | {"MEGATRON_ASYNC_CACHE": str(folder)}
    environment.pop("TRITON_CACHE_DIR", None)
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
    print("".join(f"{title:>10}" for title in ("caches", *PHASES, "ready", "first", "compiled")))
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
            times = [found["seconds"][name] for name in (*PHASES, "ready", "first_token")]
            cells = "".join(f"{value:>10.2f}" for value in times)
            print(f"{caches:>10}{cells}{found['compiled_here']:>6} of {found['kernels']}")
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
