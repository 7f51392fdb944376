"""The user's model stays theirs: it is trained while it is served, and what is served follows."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_async.compat.models import serve_model
from megatron_async.compat.models.own_layers import SharedWeights
from megatron_async.device_state import device_memory
from megatron_async.devices import CpuDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import build_model
from tests.functional_tests.compat.test_compat_models import (
    EXPERTS,
    GPT2,
    LEARNED,
    PROMPTS,
    SHARED,
    UNTIED,
)
from tests.support.capturing_cpu import CapturingCpu
from tests.support.compat_hybrids import DELTA, MAMBA, hybrid_model
from tests.support.compat_models import engine_of, fill, gpt_model, logits_of, megatron_on_a_cpu
from tests.support.harness import drain, greedy, make_model

TOKENS = 8
CONSTRUCTED = (
    "position_embedding_type",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "vocab_size",
    "pipeline_dtype",
)
"""Fields that tell no layer what to compute."""
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"qk_layernorm": True}, {}),
    "experts": (EXPERTS | SHARED, UNTIED),
    "GPT-2": (GPT2, LEARNED),
}


def generate(engine: Any) -> list[list[int]]:
    requests = engine.generate(PROMPTS, greedy(TOKENS))
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    drain(engine)
    return [list(request.generated_tokens) for request in requests]


def assert_megatrons(model: Any, found: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        logits = logits_of(model, [*prompt, *tokens])
        assert tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()


def train_one_step(model: nn.Module) -> None:
    """Forward, backward and an optimizer's step, which writes the parameters in place."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = torch.tensor([PROMPTS[0]])
    mask = torch.ones(1, 1, ids.size(1), ids.size(1)).triu(1).bool()
    with megatron_on_a_cpu():
        loss = model(ids, torch.arange(ids.size(1))[None], mask, labels=ids).mean()
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_what_training_wrote_is_served(name: str) -> None:
    changes, options = MODELS[name]
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = gpt_model({**changes, **no_dropout}, options)
    keys = list(model.state_dict())
    engine = engine_of(model, lookahead=1, device=CapturingCpu(), num_cuda_graphs=2)
    wrapper = engine.controller.inference_wrapped_model
    assert model.training, "the wrapper leaves the user's mode alone"
    before = generate(engine)
    engine.suspend(free_kv_cache=True)
    train_one_step(model)
    addresses = [parameter.data_ptr() for parameter in wrapper.model.parameters()]
    assert wrapper.refresh_weights() is False
    assert [parameter.data_ptr() for parameter in wrapper.model.parameters()] == addresses
    engine.resume()
    after = generate(engine)
    engine.close()
    assert_megatrons(model, after)
    assert after != before
    assert list(model.state_dict()) == keys


def test_without_a_refresh_copies_are_old() -> None:
    """What `refresh_weights` is for."""
    model = gpt_model(EXPERTS, UNTIED).eval()
    engine = engine_of(model, lookahead=0)
    before = generate(engine)
    engine.suspend(free_kv_cache=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(-1)
    engine.resume()
    assert generate(engine) == before
    engine.suspend(free_kv_cache=True)
    engine.controller.inference_wrapped_model.refresh_weights()
    engine.resume()
    after = generate(engine)
    engine.close()
    assert after != before
    assert_megatrons(model, after)


def test_copies_follow_weights_that_are_written_while_the_engine_runs() -> None:
    model = gpt_model(EXPERTS, UNTIED).eval()
    engine = engine_of(model, lookahead=1)
    before = generate(engine)
    with engine.weights_open("trained"):
        fill(model, seed=5)
    after = generate(engine)
    assert engine.controller.inference_wrapped_model.derived.stale() == []
    engine.close()
    assert after != before
    assert_megatrons(model, after)


@pytest.mark.parametrize("kind", ["other memory", "other parameters"])
def test_weights_that_lie_elsewhere_now(kind: str) -> None:
    model = gpt_model(EXPERTS, UNTIED).eval()
    engine = engine_of(model, lookahead=1)
    before = generate(engine)
    other = gpt_model(EXPERTS, UNTIED, seed=1)
    engine.suspend(free_kv_cache=True)
    for (name, mine), (_, new) in zip(
        list(model.named_parameters()), other.named_parameters(), strict=True
    ):
        if kind == "other memory":
            mine.data = new.data
        else:
            where, _, leaf = name.rpartition(".")
            model.get_submodule(where).register_parameter(leaf, new)
    assert engine.controller.inference_wrapped_model.refresh_weights() is True
    engine.resume()
    after = generate(engine)
    engine.close()
    assert after != before
    assert_megatrons(model, after)


def test_what_is_copied() -> None:
    model = gpt_model(EXPERTS | SHARED, UNTIED)
    weights = serve_model(model).weights
    assert weights is not None
    assert weights.copied_names == [
        f"decoder.layers.{layer}.mlp.experts.linear_fc{product}.weight"
        for layer in (1, 3)
        for product in (1, 2)
    ]
    assert weights.copied_bytes == 2 * 4 * (2 * 24 * 32 + 24 * 32) * 4


def test_in_bfloat16_only_what_is_wanted_wider_is_copied() -> None:
    model = hybrid_model("MG*-", params_dtype=torch.bfloat16, bf16=True, **MAMBA, **DELTA)
    weights = serve_model(model.bfloat16()).weights
    assert weights is not None
    assert weights.copied_names == [
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.0.mixer.D",
        "decoder.layers.1.self_attention.A_log",
        "decoder.layers.1.self_attention.out_norm.weight",
    ]
    engine = engine_of(model, lookahead=1)
    generate(engine)


def test_a_model_of_the_engines_loader_is_served_as_it_is() -> None:
    model = make_model()
    found = serve_model(model)
    assert found.served is model
    engine = engine_of(model, lookahead=1)
    assert engine.controller.inference_wrapped_model.refresh_weights() is False
    generate(engine)


def test_a_context_makes_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context has taken most of the memory; it gives that back, and then takes of what is
    left."""
    model = gpt_model(EXPERTS, UNTIED).eval()
    copies = serve_model(model).weights
    assert copies is not None
    device, bind = CpuDevice(), SharedWeights.bind
    free, caches = [2 * copies.copied_bytes], list[Any]()
    make_cache = device_memory.PagedKVCache

    def bind_and_count(weights: SharedWeights) -> None:
        free[0] -= weights.copied_bytes
        assert device.free_memory() >= 0, "there is no memory for this"
        bind(weights)

    def make_and_count(*args: Any, **kwargs: Any) -> Any:
        caches.append(make_cache(*args, **kwargs))
        return caches[-1]

    def free_memory() -> int:
        return free[0] - sum(cache.num_bytes for cache in caches if cache._data is not None)

    monkeypatch.setattr(SharedWeights, "bind", bind_and_count)
    monkeypatch.setattr(device_memory, "PagedKVCache", make_and_count)
    device.free_memory = free_memory  # type: ignore[method-assign]
    settings = {"num_kv_blocks": None, "max_requests": 2, "block_size_tokens": 4}
    engine = engine_of(model, device=device, lookahead=1, **settings)
    first, second = (cache.num_bytes for cache in caches)
    assert first > copies.copied_bytes > second
    assert engine.context.gpu_view.kv_cache is caches[1]
    assert_megatrons(model, generate(engine))


def test_experts_that_lie_side_by_side_are_shared() -> None:
    model = gpt_model(EXPERTS, UNTIED).eval()
    for layer in model.decoder.layers:
        for product in ("linear_fc1", "linear_fc2"):
            experts = [getattr(e, product).weight for e in layer.mlp.experts.local_experts]
            joined = torch.stack([expert.data for expert in experts])
            for expert, part in zip(experts, joined, strict=True):
                expert.data = part
    found = serve_model(model)
    assert found.weights is not None
    assert found.weights.copied_names == []
    engine = engine_of(model, lookahead=1)
    before = generate(engine)
    assert_megatrons(model, before)
    fill(model, seed=3)
    engine.context.reset_prefix_cache()
    engine.controller.inference_wrapped_model.refresh_weights()
    assert_megatrons(model, generate(engine))
    # One that goes elsewhere is noticed: all are copied then.
    last = model.decoder.layers[1].mlp.experts.local_experts[3].linear_fc2.weight
    last.data = last.data * -1
    engine.context.reset_prefix_cache()
    wrapper = engine.controller.inference_wrapped_model
    assert wrapper.refresh_weights() is True
    assert wrapper.refresh_weights() is False
    assert_megatrons(model, generate(engine))


def test_inside_and_outside_of_inference_mode() -> None:
    """Megatron's scripts run in it from their first line; training does not."""
    model = gpt_model(EXPERTS | SHARED, UNTIED).eval()
    with torch.inference_mode():
        engine = engine_of(model, lookahead=1)
        before = generate(engine)
        assert_megatrons(model, before)
        engine.suspend(free_kv_cache=True)
    train_one_step(model)
    engine.controller.inference_wrapped_model.refresh_weights()
    engine.resume()
    after = generate(engine)
    engine.close()
    assert after != before
    assert_megatrons(model, after)


def test_two_engines_on_one_model() -> None:
    model = gpt_model().eval()
    engines = [engine_of(model, lookahead=lookahead) for lookahead in (0, 1)]
    tokens = [generate(engine) for engine in engines]
    assert tokens[0] == tokens[1]
    assert_megatrons(model, tokens[0])
    for engine in engines:
        engine.close()


class Float16Module(nn.Module):
    """What training wraps around a model, as far as a wrapper is concerned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_of_training_are_looked_through() -> None:
    model = gpt_model().eval()
    wrapped = Float16Module(Float16Module(model))
    assert serve_model([wrapped]).user_model is model


def test_the_layers_are_those_of_a_model_that_the_engine_loads() -> None:
    """Equal modules launch equal kernels."""
    served = serve_model(gpt_model({"qk_layernorm": True})).served
    shape = ModelArchitecture(
        "qwen3", 2, 32, 4, 2, 16, 48, 96, qk_layernorm=True, tie_word_embeddings=True
    )
    loaded = build_model(shape, torch.float32, torch.device("cpu"))
    modules = [
        {name: type(module) for name, module in model.named_modules() if "rotary" not in name}
        for model in (served, loaded)
    ]
    assert modules[0] == modules[1]
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (served, loaded)]
    assert shapes[0] == shapes[1]
    configs = [
        {
            name: value
            for name, value in vars(model.config).items()
            if not callable(value) and name not in CONSTRUCTED
        }
        for model in (served, loaded)
    ]
    assert configs[0] == configs[1]
