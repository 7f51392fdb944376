"""Ranks of a model whose weights stay quantised: two of them say what one says, and hold its
codes between them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_async.checkpoints.quantised_model as quantised_model
from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.convert import convert
from megatron_async.models.held_weight import quantised_weights
from tests.support.quantised_folders import quantised_folder
from tests.support.ranks import run_ranks

SHAPES = {
    "dense": "dummy:qwen3:layers=2,hidden=256,heads=4,groups=2,head=96,ffn=512,vocab=64",
    "experts": "dummy:qwen3_moe:layers=2,hidden=128,heads=4,groups=2,head=64,ffn=256,vocab=64,"
    "experts=4,topk=2",
}
"""Ranks cut keys within blocks of 128 x 128, and the middle of each expert."""
KINDS = {"dense": "fp8 blocks", "experts": "modelopt nvfp4"}
GREEDY = SamplingParams(
    num_tokens_to_generate=8, temperature=0.0, termination_id=-1, return_log_probs=True
)


def said(folder: str, ranks: int) -> tuple[Any, int]:
    """Tokens and log probs of an engine (of the primary rank), and bytes of this rank's quantised
    weights. A CPU keeps here what a GPU does."""
    kept, quantised_model.keeps_on = quantised_model.keeps_on, lambda _device: True
    try:
        settings = {"device": "cpu", "quantization": "file", "max_requests": 2}
        with LLM(folder, tensor_model_parallel_size=ranks, **settings) as llm:
            requests = llm.generate([[5, 9, 17], list(range(30, 50))], GREEDY)
            model = llm.engine.controller.inference_wrapped_model.model
            size = sum(weight.codes.nbytes for _, weight in quantised_weights(model))
    finally:
        quantised_model.keeps_on = kept
    return [(r.generated_tokens, r.generated_log_probs) for r in requests], size


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_say_what_one_says(name: str, tmp_path: Path) -> None:
    convert(SHAPES[name], tmp_path / "plain", to="huggingface", dtype="float32")
    folder = str(quantised_folder(tmp_path / "plain", tmp_path / "m", KINDS[name]))
    expected, whole = said(folder, 1)
    (found, half), (_, other) = run_ranks(2, said, folder, 2)
    assert half == other == whole // 2 > 0
    for (tokens, log_probs), (theirs, expected_log_probs) in zip(found, expected, strict=True):
        assert tokens == theirs
        torch.testing.assert_close(
            torch.tensor(log_probs), torch.tensor(expected_log_probs), rtol=0, atol=1e-4
        )
