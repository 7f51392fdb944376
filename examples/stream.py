"""Stream answers while they are made: several requests, one engine task, text as it settles.

python examples/stream.py --model smollm2 --prompt "Once upon a time" --prompt "The sea"
"""

from __future__ import annotations

import argparse
import asyncio

from megatron_async import LLM, SamplingParams


async def show(llm: LLM, request_id: int, prompt: str, sampling: SamplingParams) -> None:
    """Add a request and print what comes, a line a chunk."""
    llm.engine.add_request(request_id, prompt, sampling)
    async for chunk in llm.engine.stream(request_id):
        print(f"[{request_id}] {chunk.text!r}")


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
