"""Hybrid models and drafts on ranks with a GPU each: called on every rank, through `LLM`.

Importing this module adds small shapes whose heads the GPU's kernels serve to `DUMMY_SHAPES`.
"""

import math
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_async import LLM
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.draft_watches import DraftRecorder
from tests.support.harness import Job, greedy, random_prompts
from tests.support.poison import poison_states

MAMBA = replace(DUMMY_SHAPES["tiny-hybrid"], kv_channels=32, mamba_head_dim=32, mamba_state_dim=64)
GATED_DELTA = replace(
    DUMMY_SHAPES["tiny-gated-delta"],
    pattern="GEG-*EGE",
    num_layers=4,
    kv_channels=32,
    linear_key_head_dim=32,
    linear_value_head_dim=64,
)
SHAPES = {
    "Mamba-2": MAMBA,
    "one group": replace(MAMBA, mamba_num_groups=1),
    "Gated DeltaNet": GATED_DELTA,
}
DUMMY_SHAPES |= {
    "gpu-attention-mtp": replace(DUMMY_SHAPES["tiny-mtp"], kv_channels=32),
    "gpu-mamba-mtp": replace(
        MAMBA, mtp_pattern="*E", mtp_num_depths=1, mtp_use_repeated_layer=True
    ),
    "gpu-gated-delta-mtp": replace(GATED_DELTA, mtp_pattern="*E", mtp_num_depths=1),
}
TENSORS, STAGES = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": TENSORS,
    "tensor and sequence": {**TENSORS, "sequence_parallel": True},
    "pipeline": STAGES,
    "experts": EXPERTS,
    "tensor and pipeline": TENSORS | STAGES,
    "tensor and experts": TENSORS | EXPERTS,
    "pipeline of 4": {"pipeline_model_parallel_size": 4},
    "experts of 4": {"expert_model_parallel_size": 4},
}
ROOM: dict[str, Any] = {
    "dtype": "float32", "max_requests": 6, "num_kv_blocks": 96, "block_size_tokens": 16,
    "max_sequence_length": 512, "max_tokens": 150,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "captured": {"lookahead": 1},
    "evictions": {"lookahead": 2, "num_kv_blocks": 26, "paused_buffer_size_gb": 1e-9},
    "snapshots": {
        "lookahead": 1,
        "enable_prefix_caching": True,
        "num_state_snapshots": 3,
        "prefix_caching_mamba_interval": 128,
    },
}
PROMPTS = random_prompts(5, (3, 40, 290, 1, 26, 7, 130, 2), MAMBA.vocab_size)
PROMPTS[6][:128] = PROMPTS[2][:128]
JOBS = [
    Job(prompt, greedy(32, seed=number, temperature=0.8 * (number % 3 == 0)))
    for number, prompt in enumerate(PROMPTS)
]
"""A third of them is drawn. The last but one begins like the longest."""
SHARES = {
    1: (tuple(range(len(JOBS))),),
    2: ((0, 1, 2, 6), (7, 3, 4, 5)),
    4: ((0, 1, 2, 6), (7, 3), (5,), (4,)),
}
"""Jobs of each replica, by how many share experts."""


class Served(NamedTuple):
    """What a rank said, by job (nothing on a rank that follows), and its engine's counters."""

    tokens: dict[int, list[int]]
    stats: dict[str, Any]


def world_of(layout: str) -> int:
    """Ranks of a layout."""
    return math.prod(size for name, size in LAYOUTS[layout].items() if name.endswith("_size"))


def numbers_of(layout: str) -> tuple[int, ...]:
    """The jobs of this rank."""
    replicas = LAYOUTS[layout].get("expert_model_parallel_size", 1)
    return SHARES[replicas][int(os.environ["RANK"]) * replicas // world_of(layout)]


def serve(folder: str, layout: str) -> dict[str, Served]:
    """This rank's jobs on GPUs, by case, with states of nobody full of NaN."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return {
        name: serve_on(folder, "cuda", numbers_of(layout), **LAYOUTS[layout], **case)
        for name, case in CASES.items()
    }


def serve_on(folder: str, device: str, numbers: tuple[int, ...], **settings: Any) -> Served:
    """Jobs of these numbers on a device."""
    settings = {**ROOM, "enable_prefix_caching": False, **settings}
    with LLM(folder, device=device, **settings) as llm:
        poison_states(llm.engine)
        jobs = [JOBS[number] for number in numbers]
        found = llm.generate([job.prompt for job in jobs], [job.params for job in jobs])
        assert all(request.error is None for request in found)
        pairs = zip(numbers, found, strict=False)  # no requests on a rank that follows
        tokens = {number: list(request.generated_tokens) for number, request in pairs}
        return Served(tokens, dict(llm.engine.stats()))


class Drafting(NamedTuple):
    """How ranks draft: name of a `dummy:` shape, "mtp" or "ngram", name in `LAYOUTS`, drafts of a
    row."""

    model: str
    method: str
    layout: str
    count: int


DRAFTING = {
    "attention": Drafting("gpu-attention-mtp", "mtp", "tensor", 2),
    # The case of RTP-LLM's pull request 972: Gated DeltaNet, experts, 4 drafts, 2 tensor ranks.
    "Gated DeltaNet": Drafting("gpu-gated-delta-mtp", "mtp", "tensor", 4),
    "experts": Drafting("gpu-mamba-mtp", "mtp", "experts", 2),
    "stages": Drafting("gpu-mamba-mtp", "ngram", "pipeline", 3),
    "tensor and experts": Drafting("gpu-gated-delta-mtp", "mtp", "tensor and experts", 2),
    "experts of 4": Drafting("gpu-mamba-mtp", "mtp", "experts of 4", 2),
    "tensor and stages": Drafting("gpu-mamba-mtp", "ngram", "tensor and pipeline", 3),
}
Drafts = dict[tuple[int, ...], list[int]]
"""The drafts after each sequence of tokens."""


def draft_alone(name: str) -> Drafts:
    """What one rank drafts step by step, on a GPU too: another device has other dummy weights."""
    return _draft(name, 0, tuple(range(len(JOBS))))


def draft_here(name: str) -> Drafts:
    """What this rank drafts, one step ahead."""
    layout = DRAFTING[name].layout
    return _draft(name, 1, numbers_of(layout), **LAYOUTS[layout])


def _draft(name: str, lookahead: int, numbers: tuple[int, ...], **sizes: Any) -> Drafts:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = DRAFTING[name]
    settings = {**ROOM, "lookahead": lookahead, "num_speculative_tokens": case.count, **sizes}
    with LLM(
        f"dummy:{case.model}", device="cuda", speculative_method=case.method, **settings
    ) as llm:
        poison_states(llm.engine)
        recorder = DraftRecorder(llm.engine)
        prompts = [JOBS[number].prompt for number in numbers]
        llm.generate(prompts, greedy(30))
        return recorder.drafts
