"""`dummy:FAMILY:SIZES`: sizes that a name spells out, and the shapes of Megatron-LM's scripts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, open_model
from megatron_async.checkpoints.info import model_info
from megatron_async.cli.main import main
from megatron_async.errors import OutOfMemoryError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES

TINY = "layers=2,hidden=64,heads=4,groups=2,ffn=96,vocab=256"
EXPERTS = "layers=2,hidden=64,heads=4,ffn=96,vocab=256,experts=4,topk=2"


def parameters(model: type, config: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model(config).parameters())


@pytest.mark.parametrize("uniform", ["", ":uniform"])
def test_sizes_are_those_of_transformers(uniform: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 256, "tie_word_embeddings": False}
    found = open_model(f"dummy:mixtral:{EXPERTS}{uniform}").architecture
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4)
    assert found.num_parameters == parameters(MixtralForCausalLM, config)
    dense = open_model(f"dummy:llama:{TINY}").architecture
    config = LlamaConfig(**sizes, num_key_value_heads=2)
    assert dense.num_parameters == parameters(LlamaForCausalLM, config)
    assert (dense.kv_channels, dense.max_position_embeddings) == (16, 32768)
    given = open_model(f"dummy:qwen3:positions=100,head=32,{TINY}").architecture
    assert (given.kv_channels, given.max_position_embeddings, given.qk_layernorm) == (32, 100, True)


def test_shapes_of_megatrons_scripts() -> None:
    """357 million are GPT-2's weights by arithmetic; learned positions and biases are not here."""
    hidden, layers, vocab, positions = 1024, 24, 51200, 2048
    matrices = layers * 12 * hidden**2 + vocab * hidden
    norms, biases = (2 * layers + 1) * hidden, layers * 11 * hidden + hidden
    assert round((matrices + positions * hidden + norms + biases) / 1e6) == 357
    assert DUMMY_SHAPES["gpt-357m"].num_parameters == matrices + norms
    assert model_info("dummy:gpt-12b").parameters == 12_247_782_400  # Mistral-NeMo's


@pytest.mark.parametrize("shape", [f"qwen2:{TINY}", "small-gpt"])
def test_one_answers(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        DUMMY_SHAPES["gpt-357m"], num_layers=2, pattern="*-", hidden_size=64, vocab_size=256,
        num_attention_heads=4, num_query_groups=4, kv_channels=16, ffn_hidden_size=96,
    )  # fmt: skip
    monkeypatch.setitem(DUMMY_SHAPES, "small-gpt", small)
    with LLM(f"dummy:{shape}", device="cpu", num_kv_blocks=4, max_requests=1) as llm:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=3, termination_id=-1)
        (answer,) = llm.generate([[1, 2, 3]], params)
    assert len(answer.generated_tokens) == 3
    assert all(0 <= token < 256 for token in answer.generated_tokens)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("llama:hiden=64," + TINY, "unknown size 'hiden'; did you mean hidden"),
        ("llama:color=1," + TINY, "unknown size 'color'; llama has layers, hidden, heads, ffn"),
        ("llama:experts=4," + TINY, "unknown size 'experts'"),
        ("llama:" + TINY + ",", "unknown size ''"),
        ("llama:" + TINY + ",heads=8", "heads is there twice"),
        ("llama:layers=2,hidden=64", "heads, ffn, vocab missing; such as llama:layers=40,hidden"),
        ("mixtral:" + TINY, "experts, topk missing"),
        ("llama", "llama needs sizes: dummy:llama:layers="),
        ("gemma:" + TINY, r"sizes are given to a family \(llama, qwen2, .*\), not to 'gemma'"),
        ("tiny:layers=3", "sizes are given to a family .*, not to 'tiny'"),
        ("llama:groups=3,head=16," + TINY.replace("groups=2,", ""), "heads=4 must be a multiple"),
        ("llama:" + TINY.replace("hidden=64", "hidden=66"), "hidden=66 must be a multiple"),
        ("llama:" + TINY.replace("hidden=64", "hidden=60"), r"head=15 .* must be even"),
        ("mixtral:" + EXPERTS.replace("topk=2", "topk=5"), "topk=5 is more than experts=4"),
        *(
            (f"llama:ffn={value}," + TINY.replace("ffn=96,", ""), f"ffn={value}.* must be a positi")
            for value in ("0", "-4", "1e3", "9.5", "", "4_0", "٤", "x")
        ),
        ("llama:" + TINY.replace("ffn=96", "ffn=" + "9" * 5000), "ffn=9{40} is more than"),
        ("llama:" + TINY.replace("layers=2", "layers=5000"), "layers=5000 is more than any model"),
        ("llama:" + TINY.replace("vocab=256", "vocab=100000000"), "vocab=.* is more than"),
        ("mixtral:" + EXPERTS.replace("experts=4", "experts=9" + "0" * 9), "experts=.* more than"),
        ("llama:" + TINY + ":even", "routing 'even' is unknown: write dummy:llama:layers=2,.*unif"),
        ("llama:" + TINY + ":uniform", "has no experts over which to spread"),
        ("mixtral:" + EXPERTS + ":uniform:uniform", "routing 'uniform:uniform' is unknown"),
    ],
)  # fmt: skip
def test_what_is_no_shape(shape: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(f"dummy:{shape}")
    assert len(str(caught.value)) < 1000


def test_absurd_sizes_are_refused_before_memory(capsys: pytest.CaptureFixture[str]) -> None:
    huge = "dummy:llama:layers=4096,hidden=1000000,heads=10,ffn=2000000000,vocab=16000000"
    with pytest.raises(OutOfMemoryError, match=r"the weights take .* GiB"):
        LLM(huge, device="cpu")
    assert main(["info", huge]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main(["info", "dummy:llama:layers=2"]) != 0
    assert "hidden, heads, ffn, vocab missing" in capsys.readouterr().err
