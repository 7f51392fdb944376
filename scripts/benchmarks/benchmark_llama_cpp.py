"""Tokens a second of a GGUF file on a CPU, beside llama.cpp, by turns.

llama.cpp is the built library of its npm binding: `npm install node-llama-cpp` in a folder, given
as --node. Both get the same random token ids and generate greedily; a first run of each is not
counted. Other work on the machine makes both slower, and threads that wait for each other most of
all: then look at tokens a second of CPU time, with --threads 1.

    python scripts/benchmarks/benchmark_llama_cpp.py --node /tmp/peer --requests 1 8
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.model_names import demo_file

PEER = """
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
const {file, batches, tokens, threads} = JSON.parse(process.argv[2]);
const sequences = batches[0].length, prompt = batches[0][0].length;
const llama = await getLlama(
    {gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
const context = await model.createContext({
    sequences, contextSize: prompt + tokens + 16, batchSize: Math.max(512, sequences * prompt),
    threads: {ideal: threads, min: threads}, flashAttention: true});
const places = Array.from({length: sequences}, () => context.getSequence());
async function answer(place, ids) {
    let count = 0;
    for await (const _ of place.evaluate(ids, {temperature: 0, yieldEogToken: true}))
        if (++count >= tokens) break;
    return count;
}
for (const batch of batches) {
    for (const place of places) await place.clearHistory();
    const begin = performance.now(), cpu = process.cpuUsage();
    const counts = await Promise.all(batch.map((ids, i) => answer(places[i], ids)));
    const wall = (performance.now() - begin) / 1e3, used = process.cpuUsage(cpu);
    const count = counts.reduce((a, b) => a + b, 0);
    console.log(JSON.stringify({count, wall, cpu: (used.user + used.system) / 1e6}));
}
process.exit(0);
"""


class Rate(NamedTuple):
    """Medians of a turn: tokens a second, of time and of CPU time."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, runs: list[tuple[int, float, float]]) -> "Rate":
        """The rate of runs of so many tokens, seconds and CPU seconds, but for the first."""
        return cls(*(median(run[0] / run[part] for run in runs[1:]) for part in (1, 2)))


def ours(arguments: argparse.Namespace, setting: str, batches: list[list[list[int]]]) -> Rate:
    """The engine's rate, in this process."""
    torch.set_num_threads(arguments.threads)
    runs, greedy = [], SamplingParams(num_tokens_to_generate=arguments.tokens, temperature=0.0)
    size: dict[str, Any] = {"max_requests": len(batches[0]), "max_sequence_length": 1024}
    quantization = None if setting == "default" else setting
    with LLM(arguments.file, device="cpu", quantization=quantization, **size) as llm:
        for batch in batches:
            begin, cpu = time.perf_counter(), time.process_time()
            found = llm.generate(batch, greedy)
            count = sum(len(request.generated_tokens) for request in found)
            runs.append((count, time.perf_counter() - begin, time.process_time() - cpu))
    return Rate.of(runs)


def theirs(arguments: argparse.Namespace, batches: list[list[list[int]]]) -> Rate:
    """llama.cpp's rate, in a process of its own."""
    work = {
        "file": arguments.file, "batches": batches, "tokens": arguments.tokens,
        "threads": arguments.threads,
    }  # fmt: skip
    script = Path(arguments.node, "peer_of_benchmark.mjs")  # finds the package beside it
    script.write_text(PEER, "utf-8")
    command = ["node", str(script), json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"node: {done.stderr.strip()}\n`npm install node-llama-cpp` in {arguments.node}")
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    return Rate.of([(run["count"], run["wall"], run["cpu"]) for run in runs])


def main() -> None:
    """Print a line for each number of requests, setting and round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node", required=True, metavar="FOLDER", help="has node_modules")
    parser.add_argument("--file", default=str(demo_file()), help="default: the demo model's")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--settings", nargs="+", default=["default", "int8"])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="of a turn, after the first run")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    generator = random.Random(0)
    for requests in arguments.requests:
        batches = [
            [[generator.randrange(100, 40_000) for _ in range(arguments.prompt_tokens)]
             for _ in range(requests)]
            for _ in range(arguments.repeats + 1)
        ]  # fmt: skip
        for _ in range(arguments.rounds):
            peer = theirs(arguments, batches)
            for setting in arguments.settings:
                found = ours(arguments, setting, batches)
                print(
                    f"{requests} requests, {setting}: tokens/s {found.wall:.1f} "
                    f"({peer.wall:.1f}), {found.wall / peer.wall:.2f}; of CPU time "
                    f"{found.cpu:.1f} ({peer.cpu:.1f}), {found.cpu / peer.cpu:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
