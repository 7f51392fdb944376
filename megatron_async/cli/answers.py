"""Answers of `generate` for people: each is shown when it ends, and a single one as it is made."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.cli.files import written_as
from megatron_async.cli.output import as_record, print_answer, print_end
from megatron_async.cli.terminal import WordWrap

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine, Prompt
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
