"""Reinforcement learning in one loop: rollouts, an optimizer step, new weights; rollouts go on.

A small Llama of transformers learns, by REINFORCE, to say even token ids. Each line tells a batch's
mean reward, the versions of the weights that made its tokens, and two K3 (an estimate of the KL
divergence): of the training log probs from those of generation, before the step, and from the
engine's scores of the same tokens, after the update. The first one is large where tokens are of
older weights; the second one is rounding. A minute on a CPU:

.venv/bin/python examples/rl_loop.py
.venv/bin/torchrun --standalone --nproc-per-node 2 examples/rl_loop.py   # trainer and engine
.venv/bin/python examples/rl_loop.py --engine-forward                    # on a Hopper GPU

The last one trains Megatron-Core's `GPTModel` in bfloat16 with the engine's forward. Trainer and
engine share its parameters and their arithmetic, so the second K3 is exactly 0.
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
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_async import (
    LLM,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.models.training import token_log_probs, use_engine_forward
from megatron_async.models.parallel_state import ensure_process_groups

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

    device = "cpu"

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            tie_word_embeddings=False,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def log_probs(self, batch: Batch) -> Tensor:
        """Of the answers' tokens, float32 `[rollouts, ANSWER]`."""
        tokens = torch.tensor([each["tokens"] for each in batch])
        logits = self.model(tokens).logits[:, PROMPT - 1 : -1].log_softmax(dim=-1)
        return logits.gather(2, tokens[:, PROMPT:, None])[..., 0]

    def learn(self, batch: Batch) -> tuple[float, float]:
        """Gradients for a step of the optimizer; the mean reward, and the K3 before the step."""
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
        return float(rewards.mean()), k3(generated, found.detach())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each parameter."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def engine(self, running: int) -> DynamicInferenceEngine:
        """An engine of the model, for `running` rollouts and as many scores."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return cpu_engine(folder, running)

    def step(self, engine: DynamicInferenceEngine, version: int) -> None:
        """A step of the optimizer, and the new weights in the engine."""
        self.optimizer.step()
        engine.update_weights(self.weights(), version)


class OneArithmetic(Trainer):
    """A model of Megatron-Core with the engine's forward, which an engine serves as it is."""

    device = "cuda"

    def __init__(self) -> None:
        config = TransformerConfig(
            num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2,
            ffn_hidden_size=512, normalization="RMSNorm", gated_linear_unit=True,
            activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
            attention_dropout=0.0, use_cpu_initialization=True, bf16=True,
            params_dtype=torch.bfloat16, persist_layer_norm=False,
            gradient_accumulation_fusion=False, bias_dropout_fusion=False,
            masked_softmax_fusion=False, attention_softmax_in_fp32=True,
        )  # fmt: skip
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
        self.model = GPTModel(
            config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCABULARY, 128,
            pg_collection=ensure_process_groups(), position_embedding_type="rope",
        ).to(self.device, torch.bfloat16)  # fmt: skip
        use_engine_forward(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.002)

    def log_probs(self, batch: Batch) -> Tensor:
        """By the engine's ops, on the CPU."""
        tokens = torch.tensor([each["tokens"] for each in batch], device=self.device)
        places = torch.arange(tokens.size(1), device=self.device)[None]
        logits = self.model(tokens, places, None)[:, PROMPT - 1 : -1]
        return token_log_probs(logits, tokens[:, PROMPT:]).cpu()

    def engine(self, running: int) -> DynamicInferenceEngine:
        """An engine of the same parameters."""
        settings = InferenceConfig(
            device=self.device, batch_invariant_mode=True, max_sequence_length=128,
            max_requests=2 * running, buffer_size_gb=1.0,  # the rest is the trainer's
        )  # fmt: skip
        context = DynamicInferenceContext(self.model.config, settings)
        wrapper = GPTInferenceWrapper(self.model, context)
        return DynamicInferenceEngine(TextGenerationController(wrapper), context)

    def step(self, engine: DynamicInferenceEngine, version: int) -> None:
        """The engine's weights are the optimizer's."""
        with engine.weights_open(version):
            self.optimizer.step()


def cpu_engine(folder: str, running: int) -> DynamicInferenceEngine:
    """An engine of the checkpoint in a folder."""
    return LLM(folder, device="cpu", max_sequence_length=128, max_requests=2 * running).engine


class Rollouts:
    """Keeps `running` requests going, over all updates of the weights."""

    def __init__(self, engine: DynamicInferenceEngine, running: int) -> None:
        self.engine = engine
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
        self.engine.add_request(self._count, prompt, params)
        self._count += 1

    def step(self) -> None:
        """One step of the engine; a rollout that ends is replaced."""
        for request in self.engine.step_modern()["finished_request_records"]:
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
        params, add = SamplingParams().scoring(PROMPT), self.engine.add_request
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


def one_process(trainer: Trainer, updates: int, batch_size: int) -> None:
    """Trainer and engine take turns; rollouts that run go on with new weights."""
    running = batch_size * 3 // 2
    rollouts = Rollouts(trainer.engine(running), running)
    for version in range(1, updates + 1):
        batch = rollouts.collect(batch_size)
        reward, before = trainer.learn(batch)
        trainer.step(rollouts.engine, version)
        scores = torch.tensor(rollouts.score(batch))
        with torch.no_grad():
            report(version, reward, batch, before, k3(scores, trainer.log_probs(batch)))
    rollouts.engine.close()


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
        trainer.optimizer.step()
        wire.tell(f"trained {version}", True)
        for _, tensor in trainer.weights():
            wire.share(tensor.contiguous())
        scores = torch.tensor(wire.hear(f"scores {version}"))
        with torch.no_grad():
            report(version, reward, batch, before, k3(scores, trainer.log_probs(batch)))


def engine_rank(wire: Wire, updates: int, batch_size: int) -> None:
    """Rank 1: steps while rank 0 learns."""
    running = batch_size * 3 // 2
    rollouts = Rollouts(cpu_engine(wire.hear("folder"), running), running)
    wire.tell("loaded", True)
    shapes: Sequence[tuple[str, list[int]]] = wire.hear("shapes")
    for version in range(1, updates + 1):
        batch = rollouts.collect(batch_size)
        wire.tell(f"batch {version}", batch)
        while not wire.store.check([f"trained {version}"]):
            rollouts.step()
        tensors = ((name, wire.share(torch.empty(shape))) for name, shape in shapes)
        rollouts.engine.update_weights(tensors, version)
        wire.tell(f"scores {version}", rollouts.score(batch))
    rollouts.engine.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--engine-forward", action="store_true", help="train with the engine's forward, on a GPU"
    )
    args = parser.parse_args()
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if args.engine_forward and not (is_alone and torch.cuda.is_available()):
        parser.error(
            "--engine-forward trains and generates in one process on a Hopper GPU, since a CPU's "
            "loops round by the number of rows: start it there without torchrun, or leave it out."
        )
    if is_alone:
        trainer = OneArithmetic() if args.engine_forward else Trainer()
        one_process(trainer, args.updates, args.batch_size)
        return
    wire = Wire()
    if wire.rank == 0:
        trainer_rank(wire, args.updates)
    elif wire.rank == 1:
        engine_rank(wire, args.updates, args.batch_size)


if __name__ == "__main__":
    main()
