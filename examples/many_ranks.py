"""One model on several GPUs, or on several processes of a laptop: tensor, pipeline, expert and
data parallelism. Start it with torchrun, or with the launch scripts, which check the sizes:

    torchrun --nproc-per-node 2 examples/many_ranks.py --tensor-model-parallel-size 2
    scripts/launch_node.sh --pp 2 examples/many_ranks.py
    scripts/launch_node.sh --ep 2 examples/many_ranks.py --model dummy:tiny-moe
    scripts/launch_node.sh --tp 3 examples/many_ranks.py --model smollm2      # it has 3 KV heads
    scripts/launch_nodes.sh --nnodes 2 --node-rank 0 --master-addr HOST --tp 8 --pp 2 \\
        examples/many_ranks.py --model ./my-llama                             # and on node 1 ...

Every rank runs this script. Those that hold one model between them are a replica; one of them, the
primary rank, gives it prompts and gets the answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_async import LLM, SamplingParams
from megatron_async.cli.options import add_parallel, parallel_sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Divide prompts between the replicas, and print what each answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:tiny")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    add_parallel(parser)
    options = parser.parse_args(arguments)

    with LLM(options.model, device=options.device, **parallel_sizes(options)) as llm:
        texts = options.prompt or ["The capital of France is", "The sea is", "One, two,", "Once"]
        # A dummy model has no tokenizer: its prompts are token ids.
        prompts = texts if llm.tokenizer else [[len(text), 7, 9] for text in texts]
        mine = prompts[llm.data_parallel_rank :: llm.data_parallel_size]
        sampling = SamplingParams(temperature=0.0, num_tokens_to_generate=options.max_new_tokens)
        # All ranks call it; those that are not primary get nothing.
        for prompt, answer in zip(mine, llm.generate(mine, sampling), strict=False):
            said = answer.error or answer.generated_text or answer.generated_tokens
            # Ranks are unbuffered: a newline of print's own would be written apart from its line,
            # and another rank's line between the two.
            line = f"replica {llm.data_parallel_rank}: {prompt!r} -> {said!r}\n"
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
