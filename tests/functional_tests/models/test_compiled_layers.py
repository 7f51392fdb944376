"""Layers of a decoder as one compiled call: the bits of the modules, in all steps without long
prefill chunks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.models import compiled_layers
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.compiled_layers import CompiledLayers
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.ops.attention.cpu import host_attention
from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.cpu import eight_bit
from tests.support.harness import TINY, make_model, random_prompts

pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")
LENGTHS = (5, 70, 1, 33)
MODELS = {
    "grouped heads": TINY,
    "norms of heads": replace(TINY, model_type="qwen3", qk_layernorm=True),
    "a bias": replace(TINY, model_type="qwen2", add_qkv_bias=True),
    "one head each": replace(TINY, num_query_groups=TINY.num_attention_heads),
    "odd sizes": replace(TINY, hidden_size=72, ffn_hidden_size=100, kv_channels=12),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "serial": {"lookahead": 0, "max_requests": 1},
    "two ahead": {"lookahead": 2, "max_tokens": 16, "max_requests": 3},
    "drafts": {"num_speculative_tokens": 2, "speculative_method": "ngram"},
    "small blocks": {"block_size_tokens": 16, "num_kv_blocks": 12},
    "shared blocks": {"block_size_tokens": 16, "enable_prefix_caching": True},
}
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def our_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit, "multiplies_integers", lambda: True)


@pytest.fixture
def threads() -> Iterator[None]:
    """Three of them, so that products and sequences are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def answers(folder: str, **settings: Any) -> tuple[Answers, int]:
    """Tokens and log probs, and how many passes the compiled layers did."""
    passes, run = 0, CompiledLayers.run

    def counted(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return run(*args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CompiledLayers, "run", counted)
        with LLM(
            folder, device="cpu", quantization="int8", check_integrity=True, **settings
        ) as llm:
            prompts = random_prompts(3, LENGTHS, llm.engine.controller.vocab_size)
            prompts.append(prompts[1] + prompts[0])
            params = SamplingParams(
                num_tokens_to_generate=24, temperature=0.0, return_log_probs=True
            )
            found = llm.generate(prompts, params)
    return [(list(r.generated_tokens), list(r.generated_log_probs)) for r in found], passes


def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "can_compile", lambda stack: False)


def store(architecture: ModelArchitecture, folder: Any) -> str:
    model = make_model(architecture)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.rand(parameter.shape, generator=generator))
    save_huggingface(model, architecture, None, folder)
    return str(folder)


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_modules(name: str, tmp_path, threads: None, monkeypatch):
    folder = store(MODELS[name], tmp_path)
    _check_bits_of_the_modules(folder, monkeypatch)


def _check_bits_of_the_modules(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, passes = answers(folder)
    modules(monkeypatch)
    assert (found, 0) == answers(folder)
    assert passes > 20
    assert min(len(set(tokens)) for tokens, _ in found) > 5, "dull answers show nothing"


def test_long_chunks_stay_modules(tmp_path, threads: None, monkeypatch):
    """Steps whose chunks all end within 33 keys are compiled, others not."""
    monkeypatch.setattr(host_attention, "LONGEST_CHUNK", 33)
    seen, serves = set(), CompiledLayers.serves

    def noted(layers: CompiledLayers, hidden_states: Any, view: Any) -> bool:
        served, lengths = serves(layers, hidden_states, view), view.dims.prefill_lengths
        seen.add((served, bool(lengths), any(kv > 33 for _, kv in lengths)))
        return served

    monkeypatch.setattr(CompiledLayers, "serves", noted)
    folder = store(TINY, tmp_path)
    found, _ = answers(folder, max_tokens=16)
    assert seen == {(True, False, False), (True, True, False), (False, True, True)}
    modules(monkeypatch)
    assert (found, 0) == answers(folder, max_tokens=16)


def test_loops_that_reorder_sums_are_compiled_once(tmp_path: Any) -> None:
    """By whomever they are called: modules, compiled layers and their helpers."""
    from megatron_async.ops.attention.cpu import attention_kernels
    from megatron_async.ops.cpu import row_kernels

    answers(store(TINY, tmp_path))
    for loop in (
        row_kernels.norm,
        row_kernels.add_norm,
        attention_kernels.rope_append,
        attention_kernels.decode_attention,
    ):
        assert len(loop.signatures) == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_every_schedule(name: str, tmp_path: Any, threads: None) -> None:
    folder = store(TINY, tmp_path)
    (expected, _), (found, passes) = answers(folder), answers(folder, **SETTINGS[name])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert passes > 8


def test_passes_of_an_mtp_layer(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's layers are compiled as the model's: passes over entries, and over drafts."""
    settings = {"num_speculative_tokens": 2, "speculative_method": "mtp"}
    found, passes = answers("dummy:tiny-mtp", **settings)
    modules(monkeypatch)
    assert (found, 0) == answers("dummy:tiny-mtp", **settings)
    assert passes > 20


@pytest.mark.parametrize("model", ["dummy:tiny-hybrid", "dummy:tiny-moe"])
def test_other_layers_stay_modules(model: str) -> None:
    assert answers(model)[1] == 0


def test_outputs_that_fill_no_block_stay_modules(tmp_path: Any) -> None:
    folder = store(replace(TINY, ffn_hidden_size=101), tmp_path)
    assert answers(folder)[1] == 0


BUGS = {
    "one cache for all layers": "grouped heads",
    "no bias": "a bias",
    "no norms": "norms of heads",
}
"""By name, and the model that shows it."""


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_seen(bug: str, tmp_path, threads: None, monkeypatch):
    from megatron_async.ops.cpu import layer_kernels as kernels

    make = CompiledLayers.__init__

    def make_wrong(layers: CompiledLayers, stack: PagedHybridStack) -> None:
        make(layers, stack)
        table = layers._table
        if bug == "one cache for all layers":
            table[:, kernels.NUMBER] = 0
        elif bug == "no bias":
            table[:, kernels.BIAS] = 0
        else:
            table[:, [kernels.Q_NORM, kernels.K_NORM]] = 0

    folder = store(MODELS[BUGS[bug]], tmp_path)
    expected, _ = answers(folder)
    monkeypatch.setattr(CompiledLayers, "__init__", make_wrong)
    found, passes = answers(folder)
    assert found != expected
    assert passes > 20
