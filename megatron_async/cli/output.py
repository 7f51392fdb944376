"""What the command line prints: answers and a table for people, one JSON document for programs."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_async.cli.files import reason

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
    """Print one prompt and its answer, or its error.

    Args:
        result: from `as_record`.
    """
    print(f">>> {result['prompt']}")
    if result["error"] is None:
        text, tokens = result["generated_text"], result["generated_tokens"]
        print(" ".join(map(str, tokens)) if text is None else text.strip(), end="")
    print_end(result, has_begun=result["error"] is None)


def print_end(result: Mapping[str, Any], has_begun: bool) -> None:
    """Print the line after an answer's text: how the answer ended, or its error.

    Args:
        result: from `as_record`.
        has_begun: whether text of it stands on the line.
    """
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
