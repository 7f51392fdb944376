"""The interface as the README writes it, and the trio by hand with Megatron-Core's names."""

import asyncio
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_async import (
    LLM,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    Status,
    TextGenerationController,
)
from megatron_async.errors import ConfigurationError
from megatron_async.models.hybrid import transformer_config
from megatron_async.models.linear import InferenceColumnParallelLinear, InferenceRowParallelLinear
from megatron_async.requests.defaults import NUM_TOKENS
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.replica_status import card_of
from megatron_async.text.tokenizer import RAW_CHAT
from tests.support.compat_models import make_gpt
from tests.support.harness import (
    TINY,
    EngineFactory,
    Job,
    greedy,
    make_model,
    random_prompts,
    run_together,
    watched,
)

STATS = {
    "steps",
    "lookahead",
    "overlap_ratio",
    "rows",
    "zombie_rows",
    "generated_tokens",
    "prefill_tokens",
    "tokens_per_second",
    "pauses",
    "evictions",
    "finished_requests",
    "failed_requests",
    "failed_steps",
    "cpu_us_per_step",
}


def test_llm_as_written(smollm2_llm: LLM) -> None:
    """`LLM("smollm2", device="cpu", lookahead=1)`, text and token ids together."""
    llm = smollm2_llm
    before = llm.engine.stats()["generated_tokens"]
    params = SamplingParams(num_tokens_to_generate=64, temperature=0.0)
    out = llm.generate(["Hello", [1, 2, 3]], params)
    assert [request.status for request in out] == [Status.COMPLETED] * 2
    for request in out:
        assert 1 <= len(request.generated_tokens) <= 64
        ended = request.generated_tokens[-1] == llm.tokenizer.eod
        assert ended or len(request.generated_tokens) == 64
        assert request.finish_reason == ("termination_id" if ended else "length")
        text_tokens = request.generated_tokens[: -1 if ended else None]
        assert request.generated_text == llm.tokenizer.detokenize(text_tokens)
        assert request.generated_text.strip()
    assert list(out[1].prompt_tokens) == [1, 2, 3]
    assert out[0].prompt == "Hello"
    stats = llm.engine.stats()
    assert stats.keys() >= STATS
    assert stats["lookahead"] == 1
    assert stats["generated_tokens"] - before == sum(len(o.generated_tokens) for o in out)
    assert 0 < stats["overlap_ratio"] <= 1
    assert stats["cpu_us_per_step"] > 0


def test_chat_as_written(smollm2_llm: LLM) -> None:
    """The README's first lines: a conversation, or several, answered by the model's template."""
    llm, sea = smollm2_llm, [{"role": "user", "content": "Name a color."}]
    params = SamplingParams(num_tokens_to_generate=12, temperature=0.0)
    (answer,) = llm.chat(sea, params)
    assert answer.succeeded()
    prompt = llm.tokenizer.apply_chat_template(sea)
    (same,) = llm.generate(llm.tokenizer.tokenize(prompt, add_special_tokens=False), params)
    assert answer.generated_text == same.generated_text
    told = [{"role": "system", "content": "You answer in one word."}, *sea]
    assert [each.generated_text for each in llm.chat([sea, told], params)] == [
        answer.generated_text,
        llm.chat(told, params)[0].generated_text,
    ]


def test_the_first_answer_of_the_demo_is_sane(smollm2_llm: LLM) -> None:
    """At the shipped defaults, whatever the seed; the server's words become the same parameters."""
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    seeded = [
        smollm2_llm.default_sampling_params(seed=seed, num_tokens_to_generate=12)
        for seed in range(20)
    ]
    answers = smollm2_llm.chat([asked] * 20, seeded)
    assert all("Paris" in answer.generated_text for answer in answers)
    card = card_of(smollm2_llm.engine, "smollm2")
    assert ServedModel.of(card).defaults == smollm2_llm.generation_defaults


def test_a_text_for_a_chat_model_is_said_once(smollm2_llm: LLM, caplog):
    llm, params = smollm2_llm, SamplingParams(num_tokens_to_generate=1)
    llm._said_raw = False
    rendered = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    llm.generate([rendered, [1, 2, 3]], params)
    assert not caplog.records
    for _ in range(2):
        llm.generate("Hello", params)
    assert [record.getMessage() for record in caplog.records] == [RAW_CHAT]


def test_a_prompt_without_parameters_gets_the_same_tokens_every_time_and_ends() -> None:
    with LLM("dummy:tiny", device="cpu") as llm:
        first, second = (llm.generate([[1, 2, 3]])[0] for _ in range(2))
    assert first.generated_tokens == second.generated_tokens
    assert len(first.generated_tokens) == NUM_TOKENS == 256


@pytest.mark.parametrize("prompt", ["Hello", [1, 2, 3]], ids=["text", "ids"])
def test_one_prompt_needs_no_list(smollm2_llm: LLM, prompt: Any) -> None:
    out = smollm2_llm.generate(prompt, SamplingParams(num_tokens_to_generate=2, temperature=0.0))
    assert len(out) == 1
    assert out[0].succeeded()


def test_ends_of_a_request(make_tiny_engine: EngineFactory, lookahead: int) -> None:
    prompt = random_prompts(3, [9])[0]
    tokens = run_together(make_tiny_engine(lookahead=0), [Job(prompt, greedy(30))])[0]
    position = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    stop = tokens[position]
    cases = [
        (greedy(30), "length", 30),
        (greedy(30, num_tokens_to_generate=None, num_tokens_total=20), "length", 11),
        (greedy(30, termination_id=stop), "termination_id", position + 1),
        (greedy(30, stop_token_ids=[stop]), "stop_token", position + 1),
        (greedy(30, num_tokens_to_generate=None), "length", 512 - len(prompt)),
        (greedy(10**6), "length", 512 - len(prompt)),  # cut at max_sequence_length
    ]
    engine = make_tiny_engine(lookahead=lookahead, max_sequence_length=512, max_requests=8)
    outputs = engine.generate([prompt] * len(cases), [params for params, _, _ in cases])
    for output, (_, reason, length) in zip(outputs, cases, strict=True):
        assert output.finish_reason == reason
        assert len(output.generated_tokens) == length
        shared = min(length, 30)
        assert output.generated_tokens[:shared] == tokens[:shared]
    # A stop token is learnt at resolve: the steps launched until then carry a zombie row each.
    assert engine.stats()["zombie_rows"] == 2 * lookahead


def test_a_request_without_a_limit_ends_where_the_pool_does(make_tiny_engine):
    """4 blocks of 16 hold 64 tokens, and the last token of all needs no place."""
    engine = make_tiny_engine(max_sequence_length=512, num_kv_blocks=4, block_size_tokens=16)
    prompt = random_prompts(3, [9])[0]
    wished = greedy(30, num_tokens_to_generate=None, termination_id=-1)
    (cut, asked) = engine.generate([prompt, prompt], [wished, greedy(100)])
    assert (cut.finish_reason, len(prompt) + len(cut.generated_tokens)) == ("length", 65)
    assert "lower num_tokens_to_generate" in str(asked.error)


def test_a_wish_that_is_cut_is_told_once(make_tiny_engine, caplog):
    engine = make_tiny_engine(max_sequence_length=47, max_requests=8)
    prompt = random_prompts(3, [9])[0]
    for output in engine.generate([prompt] * 3, greedy(1000, termination_id=-1)):
        assert len(output.generated_tokens) == 47 - len(prompt)
    (told,) = [record.getMessage() for record in caplog.records if "47" in record.getMessage()]
    assert "max_sequence_length=47" in told


def make_trio(model: torch.nn.Module, **config: Any) -> DynamicInferenceEngine:
    """Make the three parts like a Megatron-Core script."""
    inference_config = InferenceConfig(
        device="cpu",
        num_kv_blocks=64,
        block_size_tokens=16,
        max_requests=4,
        max_sequence_length=256,
        check_integrity=True,
        **config,
    )
    context = DynamicInferenceContext(model.config, inference_config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), None)
    return watched(DynamicInferenceEngine(controller, context))


def test_trio_step_by_step(tiny_model: torch.nn.Module) -> None:
    engine = make_trio(tiny_model, async_sched_mode="async")
    assert engine.lookahead == 1
    assert not engine.has_unfinished_requests()
    engine.add_request(0, [1, 2, 3], SamplingParams(num_tokens_to_generate=5, termination_id=-1))
    finished, emitted, steps = [], [], 0
    while engine.has_unfinished_requests():
        report = engine.step_modern()
        finished += report["finished_request_records"]
        for output in report["outputs"]:
            emitted += [int(token) for token in output.tokens]
        assert report["step_time"] > 0
        steps += 1
    assert [request.request_id for request in finished] == [0]
    assert finished[0].generated_tokens == emitted
    assert len(emitted) == 5
    assert steps == 6  # one more than tokens: the last call only resolves
    assert finished[0].ttft is not None
    assert finished[0].ttft <= finished[0].latency


def test_trio_under_asyncio(tiny_model: torch.nn.Module) -> None:
    """Consumers await their futures while another coroutine steps the engine."""
    jobs = [Job(prompt, greedy(12)) for prompt in random_prompts(5, [3, 17, 1])]
    engine = make_trio(tiny_model, lookahead=1)
    expected = run_together(engine, jobs)

    async def consume(number: int) -> list[int]:
        await asyncio.sleep(0.001 * number)
        job = jobs[number]
        request = await engine.add_request(100 + number, job.prompt, job.params)
        return request.generated_tokens

    async def drive(consumers: asyncio.Future[Any]) -> None:
        while not consumers.done() or engine.has_unfinished_requests():
            if engine.has_unfinished_requests():
                report = await engine.async_step()
                assert report.keys() >= {"outputs", "finished_request_records", "step_time"}
            await asyncio.sleep(0)

    async def main() -> list[list[int]]:
        consumers = asyncio.gather(*(consume(number) for number in range(len(jobs))))
        await drive(consumers)
        return await consumers

    assert asyncio.run(main()) == expected


# ---- A user's own GPTModel --------------------------------------------------------------------


def build_gpt_model() -> GPTModel:
    """Megatron's `GPTModel` with our attention in its layer spec."""
    config = transformer_config(TINY, torch.float32)
    config.hybrid_layer_pattern = None
    config.num_layers = TINY.num_layers
    return make_gpt(
        config,
        linear=(InferenceColumnParallelLinear, InferenceRowParallelLinear),
        vocab_size=TINY.vocab_size,
        max_sequence_length=TINY.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=TINY.tie_word_embeddings,
        position_embedding_type="none",
    ).requires_grad_(False)


def gpt_name(name: str) -> str:
    """`HybridModel`'s name of a parameter as `GPTModel` has it: layers 2i and 2i + 1 are one."""
    parts = name.replace("final_norm", "final_layernorm").split(".")
    if "layers" in parts:
        index = parts.index("layers") + 1
        parts[index] = str(int(parts[index]) // 2)
    return ".".join(parts)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_gpt_model(tiny_model: torch.nn.Module, lookahead: int) -> None:
    gpt = build_gpt_model()
    state = {gpt_name(name): value for name, value in tiny_model.named_parameters()}
    assert state.keys() == dict(gpt.named_parameters()).keys()
    gpt.load_state_dict(state, strict=False)
    jobs = [Job(prompt, greedy(30)) for prompt in random_prompts(6, [3, 40, 1])]
    engines = [make_trio(model, lookahead=lookahead) for model in (tiny_model, gpt)]
    hybrid_tokens, gpt_tokens = (run_together(engine, jobs) for engine in engines)
    assert gpt_tokens == hybrid_tokens


def test_model_without_paged_attention() -> None:
    model = make_model()
    context = DynamicInferenceContext(
        model.config, InferenceConfig(device="cpu", num_kv_blocks=4, max_requests=4)
    )
    with pytest.raises(
        ConfigurationError, match=r"has 0 PagedSelfAttention layers, .* for 2: build"
    ):
        GPTInferenceWrapper(torch.nn.Linear(2, 2), context)
    context.device.close()
