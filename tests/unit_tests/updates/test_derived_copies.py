"""After a round an engine says what a fresh one says with those weights, also from copies of them
in other forms."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import load_model
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.mapping import weights
from megatron_async.checkpoints.source import model_parameters, named_tensors
from megatron_async.devices import CpuDevice
from megatron_async.models.linear import weights_on_cpu
from megatron_async.models.norm import InferenceRMSNorm
from megatron_async.updates.checksum import combined, weights_checksum
from megatron_async.updates.weight_round import WeightRound

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 17], list(range(30, 60))]
PARAMS = SamplingParams(num_tokens_to_generate=8, temperature=0.0, termination_id=-1)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocked": ("dummy:tiny", {}),
    "int8, compiled layers": ("dummy:tiny", {"quantization": "int8"}),
    "zero-centred norms": ("dummy:tiny-gated-delta", {}),
    "bfloat16": ("dummy:tiny-hybrid", {"dtype": "bfloat16"}),
}


def engine(model: str | Path, options: dict[str, Any]) -> LLM:
    return LLM(str(model), device="cpu", max_tokens=32, max_requests=4, **options)


def say(llm: LLM) -> list[list[int]]:
    llm.engine.reset_prefix_cache()
    return [request.generated_tokens for request in llm.generate(PROMPTS, PARAMS)]


def trained(name: str, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Another model of the same shape in a folder, and its tensors as it has them."""
    loaded = load_model(name, dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for parameter in loaded.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += (0.1 * noise).to(parameter.dtype)
    save_huggingface(loaded.model, loaded.architecture, None, folder)
    table, found = list(weights(loaded.architecture)), dict[str, torch.Tensor]()
    held = model_parameters(named_tensors(loaded.model), table)
    for weight in table:
        found |= weight.split(held[weight.name])
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_copy_follows(case: str, tmp_path: Path, monkeypatch) -> None:
    name, options = CASES[case]
    dtype = torch.bfloat16 if "dtype" in options else torch.float32
    tensors = trained(name, tmp_path / "new", dtype)
    with engine(tmp_path / "new", options) as fresh:
        expected = say(fresh)
        checksum = combined(
            [weights_checksum(fresh.engine.controller.inference_wrapped_model.model)]
        )
    with engine(name, options) as llm:
        before = say(llm)
        wrapper = llm.engine.controller.inference_wrapped_model
        packed = [module for module, _ in weights_on_cpu(wrapper.model) if module.packed_weight]
        assert bool(packed) is (dtype == torch.float32)
        for staging in ("direct", "device"):
            new = WeightRound.of(wrapper, staging=staging)
            new.load(tensors.items())
            new.finish()
            assert say(llm) == before, "not before the commit"
            assert new.commit() is False
            assert say(llm) == expected != before
            assert wrapper.derived.stale() == []
            assert combined([weights_checksum(wrapper.model)]) == checksum
            for parameter in wrapper.model.parameters():
                parameter.data.mul_(-1)
            norms = [each for each in wrapper.model.modules() if isinstance(each, InferenceRMSNorm)]
            kept = len(packed) + sum(norm.is_zero_centered for norm in norms)
            assert len(wrapper.derived.stale()) == kept, "what nobody made again is named"
            with monkeypatch.context() as no_memory:  # copies are made again, in the form they have
                no_memory.setattr(CpuDevice, "free_memory", lambda _: 0)
                wrapper.derived.refresh()
                llm.engine.context.device.caller_waits()
            before = say(llm)
            assert wrapper.derived.stale() == []
