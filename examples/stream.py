"""Stream answers while they are made: several requests, one engine task, text as it settles.

    python examples/stream.py --model smollm2 --prompt "Once upon a time" --prompt "The sea"

A line is printed for each line of an answer, as soon as it is whole.
"""

from __future__ import annotations

import argparse
import asyncio

from megatron_async import LLM, SamplingParams


async def show(llm: LLM, request_id: int, prompt: str, sampling: SamplingParams) -> None:
    """Add a request and print its text by lines, each with the request's number."""
    answer = llm.engine.add_request(request_id, prompt, sampling)
    if answer.done():
        print(f"[{request_id}] refused: {answer.result().error}")
        return
    text, chunks = prompt, 0
    async for chunk in llm.engine.stream(request_id):
        chunks += 1
        # Without a tokenizer (dummy:tiny) a chunk has tokens alone.
        text += " ".join(["", *map(str, chunk.tokens)]) if chunk.text is None else chunk.text
        *lines, text = text.split("\n")
        for line in lines:
            print(f"[{request_id}] {line}", flush=True)
    print(f"[{request_id}] {text}\n[{request_id}] ended after {chunks} chunks", flush=True)


async def main() -> None:
    """Run the engine beside one reader a prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--stop-word", action="append", help="may be repeated")
    arguments = parser.parse_args()
    prompts = arguments.prompt or ["Once upon a time", "The capital of France is"]
    sampling = SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=arguments.max_new_tokens,
        stop_words=arguments.stop_word,
    )
    with LLM(arguments.model, progress=True) as llm:
        runner = asyncio.create_task(llm.engine.run_engine())
        await asyncio.gather(
            *(show(llm, number, prompt, sampling) for number, prompt in enumerate(prompts))
        )
        runner.cancel()


if __name__ == "__main__":
    asyncio.run(main())
