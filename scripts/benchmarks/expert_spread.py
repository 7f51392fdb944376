"""Count the experts that a step's tokens go to, layer by layer, beside what even routing gives.

Tokens that choose k of E experts evenly and independently of each other hit E (1 - (1 - k/E)^n) of
them with n tokens. Dummy models as they are made hit fewer (see `checkpoints/dummy.py`); with
--routing uniform they should hit as many. Random prompts are prefilled, then decoded; each layer's
figure is a mean over steps. Steps run eagerly, so it also says what captured steps do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_options import add_model_options, routed
from torch import Tensor, nn

from megatron_async import LLM
from megatron_async.models.moe import MoELayer
from megatron_async.ops.experts.expert_routing import NO_EXPERT, Routing
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.profiling.workloads import start_steady_decode, steady_decode_tokens

MAX_TOKENS = 2048


@dataclass
class ExpertSpread:
    """Watches a model's layers with experts.

    Args:
        model: on one rank, or on one of several, of which it then sees the own tokens.
    """

    model: nn.Module
    routings: dict[str, list[Tensor]] = field(default_factory=dict)
    """Experts int32 `[tokens, topk]` of each step, by the layer's name."""

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, MoELayer):
                self.routings[name] = []
                module.on_routing = self._note(name)

    def _note(self, name: str) -> Callable[[Routing], None]:
        def note(routing: Routing) -> None:
            self.routings[name].append(routing.experts.clone())

        return note

    def take(self, experts: int) -> dict[str, float]:
        """What was seen since the last call.

        Args:
            experts: of a layer.

        Returns:
            "tokens": mean of a step; "expected": experts hit by so many, if evenly; "hit", "least":
            mean over layers, and the layer with the fewest; "busiest": the largest load of an
            expert over a layer's mean load, in the worst layer.
        """
        hits, expected, tokens, busiest = [], [], [], 0.0
        for seen in self.routings.values():
            real = [routing[routing[:, 0] != NO_EXPERT] for routing in seen]
            real = [routing for routing in real if len(routing)]
            counts = [len(routing) for routing in real]
            hit = [routing.unique().numel() for routing in real]
            even = [experts * (1 - (1 - r.size(1) / experts) ** len(r)) for r in real]
            loads = sum(routing.flatten().long().bincount(minlength=experts) for routing in real)
            hits.append(sum(hit) / len(hit))
            expected.append(sum(even) / len(even))
            tokens.append(sum(counts) / len(counts))
            busiest = max(busiest, (loads.max() / loads.float().mean()).item())  # type: ignore[union-attr]
            seen.clear()
        layers = len(hits)
        return {
            "tokens": sum(tokens) / layers,
            "expected": sum(expected) / layers,
            "hit": sum(hits) / layers,
            "least": min(hits),
            "busiest": busiest,
        }


def measure(model: str, batch: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of "prefill" and "decode" steps of one batch size."""
    max_tokens = max(MAX_TOKENS, batch)
    length = steady_decode_tokens(batch, args.prompt_tokens, max_tokens, args.steps)
    length += args.prompt_tokens
    with LLM(
        model,
        device=args.device,
        dtype=args.dtype,
        mamba_ssm_states_dtype=args.mamba_ssm_states_dtype,
        max_requests=batch,
        max_tokens=max_tokens,
        max_sequence_length=length,
        num_kv_blocks=batch * (length // 64 + 1),
        block_size_tokens=64,
        num_cuda_graphs=0,
    ) as llm:
        engine = llm.engine
        spread = ExpertSpread(engine.controller.inference_wrapped_model.model)
        experts = engine.context.model_config.num_moe_experts
        if not spread.routings or experts is None:
            raise SystemExit(f"{model} has no layers with experts.")
        start_steady_decode(engine, batch, args.prompt_tokens, args.steps)
        figures = {"prefill": spread.take(experts)}
        for _ in range(args.steps):
            engine.step_modern()
        figures["decode"] = spread.take(experts)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dummy:nemotron-3-nano-30b"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16, help="decode steps (default 16)")
    add_model_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    columns = ("tokens", "expected", "hit", "least", "busiest")
    print(f"{'model':<36}{'batch':>6} {'steps':<8}" + "".join(f"{c:>10}" for c in columns))
    for model in routed(args.models, args.routing):
        for batch in args.batch_sizes:
            found = measure(model, batch, args)
            figures.append({"model": model, "batch": batch, **found})
            for kind, row in found.items():
                cells = "".join(f"{row[column]:>10.2f}" for column in columns)
                print(f"{model:<36}{batch:>6} {kind:<8}{cells}", flush=True)
    if args.json:
        write_record(args.json, "expert_spread", vars(args), figures)


if __name__ == "__main__":
    main()
