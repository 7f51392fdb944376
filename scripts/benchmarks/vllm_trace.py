"""Serve a trace by vLLM in the process that asks; `compare_engines.py` runs it in vLLM's Python.

    VLLM_PYTHON scripts/benchmarks/vllm_trace.py JOB.json

The job: `{"engine": keywords of AsyncEngineArgs, "traces": [[[arrival_s, prompt ids, tokens], ...],
...]}`. The answer, the last line on stdout, has for each trace a list of `[ttft_s, latency_s,
tokens]`, seconds from the arrival. It imports nothing of this project, whose torch may be another.
"""

import asyncio
import json
import sys
import time


async def serve(job: dict) -> list:
    """All traces, one after the other, on one engine."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))

    async def ask(name: str, begin: float, arrival_s: float, prompt: list, tokens: int) -> list:
        arrival = begin + arrival_s
        await asyncio.sleep(arrival - time.monotonic())
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        times, count = [], 0
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            new = len(output.outputs[0].token_ids)
            if new:
                times.append(time.monotonic() - arrival)
                count += new
        return [times[0], times[-1], count]

    answers = []
    for number, trace in enumerate(job["traces"]):
        begin = time.monotonic() + 0.5
        asked = [ask(f"{number}-{i}", begin, *request) for i, request in enumerate(trace)]
        answers.append(await asyncio.gather(*asked))
    engine.shutdown()
    return answers


def main() -> None:
    """Read the job, print the answer."""
    with open(sys.argv[1]) as file:
        job = json.load(file)
    answers = asyncio.run(serve(job))
    print("\n" + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
