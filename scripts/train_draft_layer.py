#!/usr/bin/env python
"""Train a layer for multi-token prediction for a model that came without one: self-distillation.

1. The model makes up conversations (scripts/draft_layer.py has this and the layer).
2. The engine's prefill gives the model's hidden states of them.
3. A layer begins as a copy of the model's last layer. From a token and the hidden state
   before the token, the layer learns to predict the model's distribution of the next token. The
   loss is the divergence of the two distributions: sampled tokens teach less
   (../docs/speculation.md). Embedding and output layer stay the model's.

    python scripts/train_draft_layer.py --model smollm2 --out smollm2-draft.safetensors
    megatron-async generate --model smollm2 --speculative-method mtp \
        --draft-layer smollm2-draft.safetensors --chat --prompt "Why is the sky blue?"

At the end the script measures how many drafts are accepted at temperature 0 and 1, on
conversations that were held out. The layer is trained for the first draft. With --passes 2 the
layer also learns from its own output, from which it makes the second draft.
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_layer import PATTERN, DraftLayer, HiddenStates, StateStore, make_up
from torch import Tensor
from tqdm import tqdm

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.draft_layer import save_draft_layer
from megatron_async.checkpoints.registry import open_model

HELD_OUT = 0.05
"""Share of the conversations, the last ones, on which acceptance is measured."""
WARM_UP = 0.05
"""Share of the training in which the learning rate rises."""


@dataclass(frozen=True)
class Batch:
    """Texts of one optimizer step, padded to one length: int64 tokens `[texts, length]`, the
    model's hidden states after its last norm `[texts, length, hidden]`, int64 lengths `[texts]`."""

    tokens: Tensor
    hidden: Tensor
    lengths: Tensor


def batches(
    store: StateStore, texts: Sequence[Sequence[int]], tokens: int, seed: int
) -> Iterator[Batch]:
    """All texts once, in an order of the seed's, so many tokens a batch."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    while order:
        chosen: list[int] = []
        size = 0
        while order and size < tokens:
            chosen.append(order.pop())
            size += len(texts[chosen[-1]])
        states = store.of(chosen)
        ids = [torch.tensor(texts[number]) for number in chosen]
        yield Batch(
            torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            torch.nn.utils.rnn.pad_sequence(states, batch_first=True),
            torch.tensor([len(texts[number]) for number in chosen]),
        )


def loss_of(
    layer: DraftLayer, batch: Batch, embedding: Tensor, head: Tensor, passes: int
) -> tuple[Tensor, Tensor]:
    """Divergence of the layer's distribution from the model's, and how often its favourite is the
    model's; means over the entries of the first of its `passes` on its own output. `embedding` and
    `head` are `[vocabulary, hidden]`, the model's."""
    hidden = batch.hidden.float()
    places = torch.arange(batch.tokens.size(1), device=hidden.device)
    embedded = F.embedding(batch.tokens, embedding).float()
    total, agreed = hidden.new_zeros(()), hidden.new_zeros(())
    before = hidden
    for number in range(1, passes + 1):
        # An entry at place t is of the output at t - 1 and of token t; the first is at `number`.
        out = layer(embedded[:, number:], before[:, :-1], places[number:])
        counts = places[number:] < batch.lengths[:, None]
        ours = F.linear(out[counts], head.float()).log_softmax(dim=-1)
        theirs = F.linear(hidden[:, number:][counts], head.float())
        divergence = F.kl_div(ours, theirs.log_softmax(dim=-1), log_target=True, reduction="none")
        total = total + divergence.sum(dim=-1).mean() / passes
        if number == 1:
            agreed = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean()
        before = out
    return total, agreed


def rate(done: float) -> float:
    """Share of the learning rate, when this share of the training is done: it rises, then falls as
    a cosine."""
    if done < WARM_UP:
        return (done + 0.1 * WARM_UP) / (1.1 * WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def train(
    layer: DraftLayer,
    store: StateStore,
    texts: Sequence[Sequence[int]],
    embedding: Tensor,
    head: Tensor,
    args: argparse.Namespace,
) -> tuple[float, float]:
    """Run the epochs; loss and agreement over the last tenth of the steps."""
    device = embedding.device
    layer.to(device)
    total = args.epochs * sum(map(len, texts))
    optimizer = torch.optim.AdamW(layer.parameters(), betas=(0.9, 0.95))
    seen: list[tuple[float, float]] = []
    done = 0
    with tqdm(total=total, unit="token", unit_scale=True, desc="training", disable=None) as bar:
        for epoch in range(args.epochs):
            for batch in batches(store, texts, args.batch_tokens, args.seed + epoch):
                moved = Batch(
                    batch.tokens.to(device), batch.hidden.to(device), batch.lengths.to(device)
                )
                optimizer.param_groups[0]["lr"] = args.lr * rate(done / total)
                loss, agreed = loss_of(layer, moved, embedding, head, args.passes)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
                optimizer.step()
                seen.append((float(loss.detach()), float(agreed)))
                bar.set_postfix(loss=f"{seen[-1][0]:.3f}", agrees=f"{seen[-1][1]:.3f}")
                # Not `bar.n`: a bar off a terminal counts nothing.
                done += int(batch.lengths.sum())
                bar.update(int(batch.lengths.sum()))
    last = seen[-max(len(seen) // 10, 1) :]
    losses, agreements = zip(*last, strict=True)
    return sum(losses) / len(last), sum(agreements) / len(last)


def acceptance(
    llm: LLM, prompts: Sequence[Sequence[int]], temperature: float, tokens: int
) -> list[float]:
    """Share of drafts that are accepted, by position, given those before were."""
    drafts = llm.engine.context.drafts
    assert drafts is not None, "the engine drafts"
    drafts.chooses_widths = False  # good or bad, every draft is verified
    before = llm.engine.stats()
    params = [
        SamplingParams(temperature=temperature, num_tokens_to_generate=tokens, seed=number)
        for number in range(len(prompts))
    ]
    llm.generate([list(prompt) for prompt in prompts], params)
    after = llm.engine.stats()

    def counted(name: str, position: int) -> int:
        return int(after[f"{name}_at_{position}"] - before[f"{name}_at_{position}"])

    shares, brought = [], counted("drafted_tokens", 1)
    for position in range(1, llm.engine.context.config.num_speculative_tokens + 1):
        accepted = counted("accepted_tokens", position)
        shares.append(accepted / max(brought, 1))
        brought = accepted
    return shares


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for megatron-async generate")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument(
        "--device", default=None, help="cpu or cuda (default: a GPU if there is one)"
    )
    parser.add_argument("--texts", type=int, default=20_000, help="conversations (default 20000)")
    parser.add_argument("--answer-tokens", type=int, default=512, help="most of one (default 512)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of a step (default 8192)")
    parser.add_argument("--lr", type=float, default=5e-4, help="highest (default 5e-4)")
    parser.add_argument("--passes", type=int, default=1, help="2: learn the second draft as well")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Make up texts, train, save, measure."""
    args = arguments_of(argv)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32: the loss is far rougher than its rounding
    longest = args.answer_tokens + 512
    plain = {"device": args.device, "max_sequence_length": longest, "enable_prefix_caching": False}
    with LLM(args.model, **plain) as llm:
        texts = make_up(llm, args.texts, args.answer_tokens, args.seed)
    held = max(int(HELD_OUT * len(texts)), 1)
    taught = texts[:-held]
    architecture = replace(
        open_model(args.model).architecture,
        mtp_pattern=PATTERN, mtp_num_depths=1, mtp_use_repeated_layer=True,
    )  # fmt: skip
    budget = max(args.batch_tokens + longest, 2048)
    # Few KV blocks: memory is for hidden states.
    pool = {"block_size_tokens": 64, "num_kv_blocks": 2 * budget // 64}
    with LLM(args.model, lookahead=0, num_cuda_graphs=0, max_tokens=budget, **pool, **plain) as llm:
        model = llm.engine.controller.inference_wrapped_model.model
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        embedding = weights["embedding.word_embeddings.weight"]
        head = weights.get("output_layer.weight", embedding)
        rotary = llm.engine.context.gpu_view.rotary
        layer = DraftLayer(architecture, weights, rotary.cos, rotary.sin)
        room = llm.engine.context.device.free_memory() // 4
        store = StateStore(HiddenStates(llm), taught, embedding.device, room)
        loss, agreed = train(layer, store, taught, embedding, head, args)
    tokens = sum(map(len, taught))
    facts = {
        "model": args.model, "seed": str(args.seed), "tokens": str(tokens),
        "epochs": str(args.epochs), "loss": f"{loss:.4f}", "agreement": f"{agreed:.4f}",
        "device": embedding.device.type,
    }  # fmt: skip
    save_draft_layer(layer.tensors(torch.bfloat16), PATTERN, facts, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB; loss {loss:.3f}, favourite token "
          f"agrees {agreed:.3f}, {tokens:,} tokens, {args.epochs} epochs")  # fmt: skip
    drafting = {"draft_layer": args.out, "speculative_method": "mtp", "num_speculative_tokens": 2}
    prompts = [text[: len(text) // 2] for text in texts[-held:]]
    with LLM(args.model, **plain, **drafting) as llm:
        for temperature in (0.0, 1.0):
            shares = acceptance(llm, prompts, temperature, 128)
            found = ", ".join(f"{share:.3f}" for share in shares)
            print(f"accepted at temperature {temperature:g}, held-out texts, by position: {found}")


if __name__ == "__main__":
    main()
