"""A program around a model on several ranks: an event loop on the primary rank, as a server has it.

    scripts/launch_node.sh --tp 2 examples/many_ranks_stream.py

The primary rank adds requests when it likes, while others are served; the other ranks of its model
follow it until it is done. (A server that is ready to use: `megatron-async coordinator` and
`replica`, docs/serving.md.)
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from megatron_async import LLM, SamplingParams
from megatron_async.cli.options import add_parallel, parallel_sizes


async def ask(llm: LLM, request_id: int, after_s: float, tokens: int) -> None:
    """A user who comes after a while, and reads the answer as it is made."""
    await asyncio.sleep(after_s)
    prompt = "Once upon a time" if llm.tokenizer else [request_id, 7, 9]
    sampling = SamplingParams(temperature=0.8, seed=request_id, num_tokens_to_generate=tokens)
    llm.engine.add_request(request_id, prompt, sampling)
    async for chunk in llm.engine.stream(request_id):
        said = chunk.text if llm.tokenizer else chunk.tokens
        # One write: a line's newline that is written apart may follow another rank's line.
        print(f"[{llm.data_parallel_rank}.{request_id}] {said!r}\n", end="", flush=True)


async def serve(llm: LLM, users: int, tokens: int) -> None:
    """Run the engine beside its users; ends when they are answered, those of other replicas too."""

    async def answer() -> None:
        await asyncio.gather(*(ask(llm, user, 0.1 * user, tokens) for user in range(users)))
        await llm.finish_together()

    tasks = [asyncio.create_task(llm.engine.run_engine()), asyncio.create_task(answer())]
    # The engine ends first only by an error, as when another rank dies.
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    for task in done:
        await task


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve on the primary ranks, follow on the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:tiny")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--users", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    add_parallel(parser)
    options = parser.parse_args(arguments)

    with LLM(options.model, device=options.device, **parallel_sizes(options)) as llm:
        if llm.is_primary_rank:
            asyncio.run(serve(llm, options.users, options.max_new_tokens))
        else:
            llm.follow()


if __name__ == "__main__":
    main()
