"""Reinforcement learning in one loop: rollouts, an optimizer step, new weights; rollouts go on.

A small Llama of transformers learns, by REINFORCE, to say even token ids. Each line tells a batch's
mean reward, the versions of the weights that made its tokens, and two K3 (an estimate of the KL
divergence): of the training log probs from those of generation, before the step, and from the
engine's scores of the same tokens, after the update. The first one is large where tokens are of
older weights; the second one is rounding. A minute on a CPU:

.venv/bin/python examples/rl_loop.py
.venv/bin/torchrun --standalone --nproc-per-node 2 examples/rl_loop.py   # trainer and engine
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_async import LLM, SamplingParams

VOCABULARY, PROMPT, ANSWER = 64, 6, 16
SCORES = 10**9
"""Ids of requests that are no rollouts begin here."""
Batch = list[dict[str, Any]]
"""Rollouts: "tokens" of prompt and answer, "log_probs" and "versions" of the answer's."""


def k3(first: Tensor, second: Tensor) -> float:
    """Mean of exp(d) - d - 1, where d is second - first."""
    difference = second - first
    return float((difference.expm1() - difference).mean())


class Trainer:
    """The model that learns, its rewards, and its weights by their names in Hugging Face."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def log_probs(self, batch: Batch) -> Tensor:
        """Of the answers' tokens, float32 `[rollouts, ANSWER]`."""
        tokens = torch.tensor([each["tokens"] for each in batch])
        logits = self.model(tokens).logits[:, PROMPT - 1 : -1].log_softmax(dim=-1)
        return logits.gather(2, tokens[:, PROMPT:, None])[..., 0]

    def learn(self, batch: Batch) -> tuple[float, float]:
        """One step of the optimizer; the mean reward, and the K3 before the step."""
        answers = torch.tensor([each["tokens"][PROMPT:] for each in batch])
        rewards = (answers % 2 == 0).float().mean(dim=1)
        found = self.log_probs(batch)
        generated = torch.tensor([each["log_probs"] for each in batch])
        # Tokens of older weights count by how likely they are now.
        ratio = (found.detach() - generated).exp().clamp(max=2.0)
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        loss = -(ratio * found * advantage[:, None]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(rewards.mean()), k3(generated, found.detach())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each parameter."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()


class Rollouts:
    """Keeps `running` requests going, over all updates of the weights."""

    def __init__(self, folder: str, running: int) -> None:
        self.llm = LLM(folder, device="cpu", max_sequence_length=128, max_requests=2 * running)
        self._ended: list[Any] = []
        self._choose = torch.Generator().manual_seed(1)
        self._count = 0
        for _ in range(running):
            self._add()

    def _add(self) -> None:
        prompt = torch.randint(VOCABULARY, (PROMPT,), generator=self._choose)
        params = SamplingParams(
            num_tokens_to_generate=ANSWER, termination_id=-1, seed=self._count,
            return_log_probs=True, skip_prompt_log_probs=True,
        )  # fmt: skip
        self.llm.engine.add_request(self._count, prompt, params)
        self._count += 1

    def step(self) -> None:
        """One step of the engine; a rollout that ends is replaced."""
        for request in self.llm.engine.step_modern()["finished_request_records"]:
            if request.request_id < SCORES:
                self._ended.append(request)
                self._add()

    def collect(self, count: int) -> Batch:
        """Step until `count` rollouts have ended."""
        while len(self._ended) < count:
            self.step()
        taken, self._ended = self._ended[:count], self._ended[count:]
        return [
            {
                "tokens": [*each.prompt_tokens.tolist(), *each.generated_tokens],
                "log_probs": each.generated_log_probs,
                "versions": each.weight_versions,
            }
            for each in taken
        ]

    def score(self, batch: Batch) -> list[list[float]]:
        """Log probs of the answers' tokens under the engine's weights, among the rollouts."""
        params, add = SamplingParams().scoring(PROMPT), self.llm.engine.add_request
        futures = [add(SCORES + i, each["tokens"], params) for i, each in enumerate(batch)]
        while not all(future.done() for future in futures):
            self.step()
        return [[*(future.result().prompt_log_probs or ())] for future in futures]


def report(version: int, reward: float, batch: Batch, before: float, after: float) -> None:
    """Print a line."""
    names = {name or 0 for each in batch for name, *_ in each["versions"]}
    versions = ", ".join(map(str, sorted(names)))
    print(
        f"update {version}: reward {reward:.2f}, tokens of versions {versions}, "
        f"K3 before {before:.1e}, after {after:.1e}",
        flush=True,
    )


def one_process(updates: int, batch_size: int) -> None:
    """Trainer and engine take turns; rollouts that run go on with new weights."""
    trainer = Trainer()
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        rollouts = Rollouts(folder, batch_size * 3 // 2)
    engine = rollouts.llm.engine
    for version in range(1, updates + 1):
        batch = rollouts.collect(batch_size)
        reward, before = trainer.learn(batch)
        engine.update_weights(trainer.weights(), version)
        scores = torch.tensor(rollouts.score(batch))
        with torch.no_grad():
            report(version, reward, batch, before, k3(scores, trainer.log_probs(batch)))
    rollouts.llm.close()


class Wire:
    """Between the two ranks: values by the store of torchrun, weights by a gloo group. The engine
    is a job of its own, so it shall not see torchrun's variables."""

    def __init__(self) -> None:
        self.rank, world = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        keeps_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=300)
        self.store = dist.TCPStore(host, port, world, keeps_store, limit)
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("rl", self.store), self.rank, world, limit
        )

    def tell(self, key: str, value: Any) -> None:
        """Write a value, once."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """Read a value; waits for it."""
        return json.loads(self.store.get(key))

    def share(self, tensor: Tensor) -> Tensor:
        """A tensor of rank 0, on both ranks."""
        self._group.broadcast(tensor, 0).wait()
        return tensor


def trainer_rank(wire: Wire, updates: int) -> None:
    """Rank 0."""
    trainer = Trainer()
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        wire.tell("folder", folder)
        wire.hear("loaded")
    wire.tell("shapes", [[name, [*tensor.shape]] for name, tensor in trainer.weights()])
    for version in range(1, updates + 1):
        batch = wire.hear(f"batch {version}")
        reward, before = trainer.learn(batch)
        wire.tell(f"trained {version}", True)
        for _, tensor in trainer.weights():
            wire.share(tensor.contiguous())
        scores = torch.tensor(wire.hear(f"scores {version}"))
        with torch.no_grad():
            report(version, reward, batch, before, k3(scores, trainer.log_probs(batch)))


def engine_rank(wire: Wire, updates: int, batch_size: int) -> None:
    """Rank 1: steps while rank 0 learns."""
    rollouts = Rollouts(wire.hear("folder"), batch_size * 3 // 2)
    wire.tell("loaded", True)
    shapes: Sequence[tuple[str, list[int]]] = wire.hear("shapes")
    for version in range(1, updates + 1):
        batch = rollouts.collect(batch_size)
        wire.tell(f"batch {version}", batch)
        while not wire.store.check([f"trained {version}"]):
            rollouts.step()
        tensors = ((name, wire.share(torch.empty(shape))) for name, shape in shapes)
        rollouts.llm.engine.update_weights(tensors, version)
        wire.tell(f"scores {version}", rollouts.score(batch))
    rollouts.llm.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        one_process(args.updates, args.batch_size)
        return
    wire = Wire()
    if wire.rank == 0:
        trainer_rank(wire, args.updates)
    elif wire.rank == 1:
        engine_rank(wire, args.updates, args.batch_size)


if __name__ == "__main__":
    main()
