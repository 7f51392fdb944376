"""Throughput of the engine beside transformers' batched `generate`, same weights, same run.

Both generate the same number of tokens for the same prompts, greedily; measurements alternate, and
the ratio is that of the medians. Needs the dev extra (transformers).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_async import LLM, SamplingParams


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time of one call, device work included."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def load_transformers(folder: Path, device: str, dtype: str) -> Any:
    """The model of a Hugging Face folder, as transformers runs it by default."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def main() -> None:
    """Print one line a batch size and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="anything that LLM loads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="default float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens a request")
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--quantization", default=None, help="int8: 8-bit weights of ours")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")

    from megatron_async.checkpoints.convert import convert

    llm = LLM(
        args.model,
        enable_prefix_caching=False,  # prompts come again, and all of them are to be computed
        device=args.device,
        dtype=dtype,
        lookahead=args.lookahead,
        quantization=args.quantization,
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        convert(args.model, folder, to="huggingface", progress=False)
        reference = load_transformers(folder, args.device, dtype)
    vocabulary = llm.engine.controller.vocab_size
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=args.tokens, termination_id=-1)
    figures = []
    print(f"{args.model}, {dtype} on {args.device}: {args.prompt_tokens} + {args.tokens} tokens")
    print(f"{'batch':>6}{'engine tok/s':>14}{'transformers':>14}{'ratio':>8}{'same tokens':>13}")
    for batch in args.batch_sizes:
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(vocabulary, (batch, args.prompt_tokens), generator=generator)
        prompts = [list(map(int, row)) for row in ids]
        device_ids = ids.to(args.device)

        def ours() -> list[list[int]]:
            return [out.generated_tokens for out in llm.generate(prompts, params)]  # noqa: B023

        @torch.inference_mode()
        def theirs() -> torch.Tensor:
            return reference.generate(
                device_ids,  # noqa: B023
                attention_mask=torch.ones_like(device_ids),  # noqa: B023
                max_new_tokens=args.tokens,
                min_new_tokens=args.tokens,
                do_sample=False,
                pad_token_id=0,
            )[:, args.prompt_tokens :]

        tokens, expected = ours(), theirs().cpu().tolist()
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(args.repeats):
            times["ours"].append(seconds(ours, args.device))
            times["theirs"].append(seconds(theirs, args.device))
        speed = {k: batch * args.tokens / statistics.median(v) for k, v in times.items()}
        ratio = speed["ours"] / speed["theirs"]
        figures.append({"batch": batch, **speed, "ratio": ratio, "same": same})
        print(
            f"{batch:>6}{speed['ours']:>14.1f}{speed['theirs']:>14.1f}{ratio:>8.2f}"
            f"{same:>10}/{batch}"
        )
    llm.close()
    if args.json:
        note = {"date": time.strftime("%F"), "threads": os.cpu_count(), "settings": vars(args)}
        Path(args.json).write_text(json.dumps({**note, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
