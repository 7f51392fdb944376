"""What the command line prints: answers and a table for people, one JSON document for programs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_async.cli.files import reason, written_as
from megatron_async.cli.terminal import WordWrap

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine, Prompt
    from megatron_async.requests.inference_request import DynamicInferenceRequest
    from megatron_async.requests.sampling_params import SamplingParams


def printer_of_ended(prompts: Sequence[str]) -> Callable[[DynamicInferenceRequest], None]:
    """Prints each answer of a new engine's first requests when it ends, above a progress bar.

    Args:
        prompts: as people wrote them; the engine numbers their requests from 0.
    """
    from tqdm import tqdm

    def show(request: DynamicInferenceRequest) -> None:
        # Flushed, so that Ctrl-C, a full disk or a crash loses no answer that was there.
        with tqdm.external_write_mode(), written_as("standard output"):
            print_answer(as_record(prompts[request.request_id], request))
            sys.stdout.flush()

    return show


def print_as_it_is_made(
    engine: DynamicInferenceEngine, shown: str, prompt: Prompt, sampling: SamplingParams
) -> DynamicInferenceRequest:
    """Run one request, and print its text (without a tokenizer, its tokens) token by token: in the
    end it is what `print_answer` prints.

    Args:
        engine: one that does nothing else.
        shown: the prompt as people wrote it.
        prompt: the prompt as the model gets it.
        sampling: of the request.
    """
    return asyncio.run(_print_stream(engine, shown, prompt, sampling))


async def _print_stream(
    engine: DynamicInferenceEngine, shown: str, prompt: Prompt, sampling: SamplingParams
) -> DynamicInferenceRequest:
    running = asyncio.create_task(engine.run_engine())
    number = engine.requests.free_id()
    answer = engine.add_request(number, prompt, sampling)
    printer = _StreamPrinter()
    with written_as("standard output"):
        print(f">>> {shown}", flush=True)

    async def read() -> None:
        if answer.done():  # refused
            return
        try:
            async for chunk in engine.stream(number):
                with written_as("standard output"):
                    printer.show(" ".join(map(str, chunk.tokens)) + " " if chunk.text is None
                                 else chunk.text)  # fmt: skip
        except Exception:
            if not answer.done() or answer.result().error is None:
                raise  # no failure of the request's, which is printed after its text

    reading = asyncio.create_task(read())
    done, _ = await asyncio.wait({running, reading}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    for task in done:
        await task  # the engine ends first only by an error
    request = await answer
    with written_as("standard output"):
        printer.end()
        print_end(as_record(shown, request), printer.has_begun)
        sys.stdout.flush()
    return request


def _print(text: str) -> None:
    print(text, end="", flush=True)


class _StreamPrinter:
    """Prints a text that comes in parts, without the white space at its beginning and its end.

    Attributes:
        has_begun: something was printed.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._held_back = ""
        wrap = WordWrap(_print) if sys.stdout.isatty() else None
        self._write = wrap.show if wrap else _print
        self.end = wrap.end if wrap else lambda: None

    def show(self, text: Any) -> None:
        text = self._held_back + text
        if not self.has_begun:
            text = text.lstrip()
        said = text.rstrip()
        self._held_back = text[len(said) :]
        if said:
            self.has_begun = True
            self._write(said)


if TYPE_CHECKING:
    from megatron_async.requests.inference_request import DynamicInferenceRequest

NO_ROOM = re.compile("failed to map|cannot allocate memory", re.IGNORECASE)
"""Words of glibc's loader, where a process may not have the memory for a library."""

STATISTICS = (
    ("tokens_per_second", "tokens/s", "{:.1f}"),
    ("generated_tokens", "generated tokens", "{}"),
    ("steps", "steps", "{}"),
    ("lookahead", "lookahead", "{}"),
    ("overlap_ratio", "overlap ratio", "{:.2f}"),
    ("zombie_rows", "zombie rows", "{}"),
    ("cpu_us_per_step", "CPU microseconds a step", "{:.0f}"),
)
"""Rows of the final table: key in `engine.stats()`, name, format."""

STATISTICS_WHEN_NOT_ZERO = (
    ("pauses", "pauses", "{}", "pauses"),
    ("evictions", "evictions", "{}", "evictions"),
    ("drafted_tokens", "drafted tokens", "{}", "drafted_tokens"),
    ("accepted_tokens", "of these accepted", "{}", "drafted_tokens"),
    ("mean_accepted_length", "tokens a row and step", "{:.2f}", "drafted_tokens"),
)
"""Rows that are shown where something is not zero: key in `engine.stats()`, name, format, and the
key that must not be zero."""


def describe(error: BaseException) -> str:
    """An error's message, and the first line of its cause's unless the message says as much; its
    class name where it has no message. Of the system's errors it is the file and what is wrong,
    without a number."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = reason(error) if error.filename is None else f"{error.filename}: {reason(error)}"
    cause = error.__cause__
    if cause is not None and not _says(text, cause):
        first, *_ = str(cause).splitlines() or [""]
        text += f" (cause: {type(cause).__name__}: {first})"
    if os.strerror(errno.EMFILE).lower() in text.lower():
        text += f": {_file_limit()}"
    return text


def _file_limit() -> str:
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a process may have {allowed} files and sockets here, and a job of several ranks needs "
        "more for each of its groups: raise the limit, as by `ulimit -n 4096`"
    )


@contextmanager
def libraries_that_fit() -> Iterator[None]:
    """Inside, a library for which the process may not take the memory is a MemoryError; the loader
    (dlopen) says so in an ImportError, which otherwise is a bug of ours or of the installation."""
    try:
        yield
    except ImportError as error:
        lines = []
        cause: BaseException | None = error
        while cause is not None:
            lines += [line for line in str(cause).splitlines() if NO_ROOM.search(line)]
            cause = cause.__cause__
        if not lines:
            raise
        raise MemoryError(
            f"this process may not take as much memory as its libraries need ({lines[-1]}): raise "
            "its limit of address space (`ulimit -v`; torch takes some GB of it)."
        ) from None


def _says(text: str, cause: BaseException) -> bool:
    """Whether a message says what its cause says, in the same words or by a system error's."""
    if isinstance(cause, OSError) and cause.strerror:
        return reason(cause) in text.lower()
    # A cause of many lines is a traceback of torch's, whose last lines have the reason.
    lines = [line.partition("Error: ")[2] or line for line in str(cause).splitlines()]
    return any(line.strip() in text for line in lines if len(line.strip()) > 3)


def as_record(prompt: str, result: DynamicInferenceRequest) -> dict[str, Any]:
    """What `--json` says of one request; `ttft` and `latency` are seconds."""
    log_probs = {
        name: value
        for name in (
            "generated_log_probs",
            "prompt_log_probs",
            "generated_top_n_logprobs",
            "prompt_top_n_logprobs",
        )
        if (value := getattr(result, name)) is not None
    }
    return {
        "request_id": result.request_id,
        "prompt": prompt,
        "prompt_tokens": result.prompt_tokens,
        "generated_text": result.generated_text,
        "generated_tokens": result.generated_tokens,
        "status": result.status.name,
        "finish_reason": result.finish_reason,
        "error": None if result.error is None else describe(result.error),
        "ttft": result.ttft,
        "latency": result.latency,
        **log_probs,
    }


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document; NumPy arrays and numbers become lists and numbers."""
    print(json.dumps(document, indent=2, ensure_ascii=False, default=lambda v: v.tolist()))


def print_answer(result: Mapping[str, Any]) -> None:
    """Print one prompt and its answer, or its error."""
    print(f">>> {result['prompt']}")
    if result["error"] is None:
        text, tokens = result["generated_text"], result["generated_tokens"]
        print(" ".join(map(str, tokens)) if text is None else text.strip(), end="")
    print_end(result, has_begun=result["error"] is None)


def print_end(result: Mapping[str, Any], has_begun: bool) -> None:
    """Print the line after an answer's text: how the answer ended, or its error."""
    if result["error"] is not None:
        newline = "\n" if has_begun else ""
        print(f"{newline}FAILED: {result['error']}\n")
        return
    latency = result["latency"]
    seconds = "" if latency is None else f", {latency:.2f} s"
    count = len(result["generated_tokens"])
    print(f"\n    [{count} tokens, {result['finish_reason']}{seconds}]\n")


def print_statistics(*replicas: Mapping[str, Any]) -> None:
    """Print the final table on stderr, beside the answers, with a column for each replica."""
    rows = [row for row in STATISTICS if row[0] in replicas[0]]
    rows += [
        (key, name, layout)
        for key, name, layout, when in STATISTICS_WHEN_NOT_ZERO
        if any(stats.get(when) for stats in replicas)
    ]
    width = max(len(name) for _, name, _ in rows)
    if len(replicas) > 1:
        print(
            f"{'replica':<{width}}" + "".join(f"  {n:>10}" for n in range(len(replicas))),
            file=sys.stderr,
        )
    for key, name, layout in rows:
        cells = [layout.format(stats[key]) for stats in replicas]
        print(f"{name:<{width}}" + "".join(f"  {cell:>10}" for cell in cells), file=sys.stderr)
