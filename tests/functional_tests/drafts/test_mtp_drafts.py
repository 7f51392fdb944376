"""The MTP drafter cannot be seen in the output, its drafts are those of the layer over the whole
sequence, and text that it knows comes several tokens at once.

On a model with recurrent layers a rejected draft leaves its inputs in the ring of its slot, behind
the length of the sequence, where the tokens that follow lie over them. The state itself never takes
a draft in.
"""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams, StructuredOutput
from megatron_async.checkpoints.registry import DEMO, DEMO_DRAFT_LAYER, shipped_draft_layer
from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import load_recording
from megatron_async.lab.replay import Replay
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.graph_shapes import GraphShapes
from tests.support.attention_model import VOCABULARY
from tests.support.capturing_cpu import CapturingCpu
from tests.support.draft_watches import MtpWatch, WholeSequences
from tests.support.drafters import DRAFTERS
from tests.support.drawn_drafts import DrawnSchedules
from tests.support.harness import (
    TINY,
    Job,
    alone_once,
    assert_all_is_back,
    greedy,
    kept,
    make_engine,
    make_model,
    random_prompts,
    run_at,
)
from tests.support.hybrid_model import HYBRID_MODELS, HybridAttentionModel
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import Pieces
from tests.support.mtp_model import MTP_MODELS, MtpModel
from tests.support.poison import poison_blocks, poison_states

PARTS, DRAWS = 2, 12
MODELS: dict[str, MtpModel] = {}


def model_of(name: str) -> MtpModel:
    """One of each kind."""
    if name not in MODELS:
        MODELS[name] = MTP_MODELS[name]()
    return MODELS[name]


@cache
def serial_of(name: str) -> DynamicInferenceEngine:
    """Plain decoding by one of each kind; it is never closed, as it is shared."""
    return kept(make_engine(model_of(name), lookahead=0))


@cache
def whole_of(name: str) -> WholeSequences:
    """What drafts of texts must be; cases of one model have the same texts."""
    return WholeSequences(model_of(name))


@pytest.mark.pairs
@pytest.mark.parametrize("name", MTP_MODELS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_text_that_it_knows(name: str, lookahead: int, count: int) -> None:
    """A known text takes about as many steps fewer as drafts were right, at every lookahead: a
    stale read would show here. Break one of these, and it fails: `lay_out_entries.reference` with
    `source` one token late; `MtpDrafter.propose` without the noise of the position
    (`entries.lengths` without `number`)."""
    model, tokens = model_of(name), 90
    jobs = [Job([1 + n, 5, 7 + n], greedy(tokens, seed=n, temperature=0.5 * n)) for n in range(2)]
    plain = alone_once(serial_of(name), jobs)
    whole = whole_of(name)
    whole.expect([[*job.prompt, *answer] for job, answer in zip(jobs, plain, strict=True)])
    for job, answer in zip(jobs, plain, strict=True):
        settings: dict[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": count}
        engine = make_engine(model, lookahead=lookahead, block_size_tokens=4, **settings)
        watch = MtpWatch(engine, whole)
        assert run_at(engine, {0: [job]})[0] == answer
        stats = engine.stats()
        engine.close()
        useful = stats["steps"] - stats["zombie_steps"]
        assert useful == tokens - stats["accepted_tokens"]
        assert stats["accepted_tokens"] > 0.3 * tokens
        assert watch.rows >= useful - 3


@pytest.mark.parametrize("part", range(PARTS))
def test_tokens_are_those_of_plain_decoding(part: int) -> None:
    """Modes, 1 to 4 drafts, lookahead 0 to 2, both models, borders of blocks, small pools, shared
    prefixes, aborts and stops, drawn by a seed; each draft is what the layer gives over the whole
    sequence.

    Break one of these, and it fails:

    - `RequestSlots.with_drafts`: the places alone
    - `MtpDrafter.propose`: keep hidden states before they are gathered, or not at all
    - `TorchPagedAttention._sees`: without `first_key`
    """
    drawn = DrawnSchedules({name: model_of(name) for name in MTP_MODELS})
    whole = {name: WholeSequences(model_of(name)) for name in MTP_MODELS}
    for seed in range(part * DRAWS, (part + 1) * DRAWS):
        name = tuple(MTP_MODELS)[seed % 3]
        watched = partial(MtpWatch, whole=whole[name])
        watch = drawn.play(
            seed, name, "mtp", 1 + seed // 2 % 4, seed // 8 % 3, watched, expect=whole[name].expect
        )
        drawn.seen["watched"] += watch.rows
    drawn.close()
    for each in whole.values():
        each.close()
    seen = drawn.seen
    wanted = ("pauses", "evictions", "zombie_rows", "aborted", "prefix_cache_hits",
              "accepted_tokens_at_4", "fewer_drafts_blocks", "fewer_drafts_length")  # fmt: skip
    assert [name for name in wanted if not seen[name]] == [], seen
    assert seen["watched"] > 200
    assert seen["accepted_tokens"] > 0.3 * seen["drafted_tokens"] > 200


def test_requests_that_want_fewer() -> None:
    """A request may take fewer drafts, or none."""
    model = model_of("MtpModel")
    jobs = [Job([3, 5, 7], greedy(40, num_speculative_tokens=most)) for most in (0, 1, None)]
    engine = make_engine(model, speculative_method="mtp", num_speculative_tokens=3)
    first, *others = run_at(engine, {0: jobs})
    stats = engine.stats()
    assert others == [first, first]
    assert stats["drafted_tokens_at_1"] > stats["drafted_tokens_at_2"] > 0


def test_an_answer_under_a_grammar_is_not_shared() -> None:
    """Tokens under a grammar are chosen behind the step, so their entries are not those of the
    layer; the blocks of its prompt are shared. Break it: `PrefixCache._held` without
    `is_constrained`, and the watch finds a wrong draft."""
    model = model_of("MtpModel")
    engine = make_engine(
        model, tokenizer=Pieces(), block_size_tokens=1, speculative_method="mtp",
        num_speculative_tokens=3,
    )  # fmt: skip
    whole = WholeSequences(model)
    watch = MtpWatch(engine, whole)
    prompt = [24, 26, 2, 16]
    grammar = greedy(6, structured_output=StructuredOutput(regex="(ab|cd|d)*"))
    (answer,) = run_at(engine, {0: [Job(prompt, grammar)]})
    for length in (1, 3, 5):
        turn = Job([*prompt, *answer[:length]], greedy(4))
        before = engine.stats()["prefix_cache_hits"]
        run_at(engine, {0: [turn]}, first_id=length)
        assert engine.stats()["prefix_cache_hits"] - before >= len(prompt)
    assert watch.rows >= 6
    whole.close()


@pytest.mark.parametrize("name", ["MtpModel", "MtpDeepModel"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_prompt_of_whole_blocks(name: str, size: int) -> None:
    """The last token is computed again; the draft model's entries are in the shared block too.

    Break one of these, and it fails:

    - `lay_out_entries.reference`: `is_written` is all True
    - `lay_out_behind`: `source[behind]` stays
    """
    engine = make_engine(
        model_of(name), block_size_tokens=size, speculative_method="mtp", num_speculative_tokens=3
    )
    poison_blocks(engine)
    watch = MtpWatch(engine, whole_of(name))
    jobs = [Job([3 + n, 5, 7, 2, 9, 11, 4, 1][: 4 + 4 * n], greedy(7)) for n in range(2)]
    for number, job in enumerate([*jobs, *jobs]):
        before, rows = engine.stats()["prefix_cache_hits"], watch.rows
        asked = [job] * (1 + number // 2)  # two together, the second time
        found = run_at(engine, {0: asked}, first_id=10 * number)
        assert found == alone_once(serial_of(name), [job]) * len(asked)
        hits = engine.stats()["prefix_cache_hits"] - before
        assert hits == (2 * (len(job.prompt) - 1) if number > 1 else 0)
        assert watch.rows > rows


def test_a_draft_vocabulary_larger_than_the_models() -> None:
    with pytest.raises(ConfigurationError, match=r"draft_vocab_size=49 is more.*48 tokens"):
        make_engine(model_of("MtpModel"), speculative_method="mtp", draft_vocab_size=49)


@pytest.mark.parametrize("decode_rows", [0, 2])
def test_a_step_of_dummy_rows(decode_rows: int) -> None:
    """What graphs are captured with: chunks of no token, whose last one is no token's index. Break
    it: `ends_of_rows` without `clamp`."""
    model = make_model(replace(TINY, mtp_pattern="*-", mtp_num_depths=2), with_mtp=True)
    engine = make_engine(model, speculative_method="mtp", num_speculative_tokens=3)
    context, controller = engine.context, engine.controller
    rows = context.config.mixed_prefill_rows
    shapes = GraphShapes(mixed_sizes={64: (decode_rows,)}, prefill_rows=rows, longest_sequence=512)
    dims = replace(shapes.shape(decode_rows, 64), max_decode_kv_length=512)
    context.transfer_dummy_rows_to_gpu(dims)
    controller._compute_step(dims, SamplingMode.GREEDY)
    context.expect_step()
    tokens = run_at(engine, {0: [Job([3, 5, 7], greedy(12))]})
    engine.close()
    plain = make_engine(model)
    assert tokens == run_at(plain, {0: [Job([3, 5, 7], greedy(12))]})


def test_record_and_replay(tmp_path: Path) -> None:
    """A replay has neither the model nor its layer: it takes the recorded drafts, and reserves the
    same places for them."""
    model = make_model(replace(TINY, mtp_pattern="*-", mtp_num_depths=2), with_mtp=True)
    engine = make_engine(
        model, lookahead=1, max_requests=3, max_tokens=40, block_size_tokens=4, num_kv_blocks=24,
        speculative_method="mtp", num_speculative_tokens=3,
    )  # fmt: skip
    recorder = Recorder(engine, tmp_path / "run.rec")
    jobs = [Job([1 + n, 5, 7], greedy(50)) for n in range(4)]
    run_at(engine, {0: jobs[:2], 5: jobs[2:]})
    recorder.close()
    engine.close()
    stats = engine.stats()
    assert min(stats["drafted_tokens"], stats["pauses"]) > 0
    assert Replay(load_recording(tmp_path / "run.rec")).run() == stats["steps"]


QUESTIONS = ("What is the capital of France?", "Give me three tips for learning a language.")
TOKENS = 40


def answers(**drafting: str) -> tuple[list[list[int]], dict[str, float]]:
    with LLM(DEMO, device="cpu", **drafting) as llm:
        assert llm.tokenizer is not None
        chats = [
            llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question in QUESTIONS
        ]
        prompts = [llm.tokenizer.tokenize(chat, add_special_tokens=False) for chat in chats]
        params = [
            SamplingParams(num_tokens_to_generate=TOKENS, temperature=temperature, seed=7)
            for temperature in (0.0, 1.0)
        ]
        found = llm.generate(prompts, params)
        return [request.generated_tokens for request in found], dict(llm.engine.stats())


def test_the_demo_models_layer() -> None:
    """Trained on a GPU for six minutes: 0.73 of greedy drafts are accepted, 0.48 at temperature 1.
    Break it: another seed in `torch.randn` instead of the file's tensors accepts next to
    nothing."""
    assert DEMO_DRAFT_LAYER.stat().st_size < 10e6
    plain, _ = answers()
    drafted, stats = answers(speculative_method="mtp")
    assert drafted == plain
    assert stats["drafted_tokens"] > TOKENS / 2
    assert stats["accepted_tokens"] > 0.4 * stats["drafted_tokens"]


def test_other_models_have_none() -> None:
    assert shipped_draft_layer("dummy:smollm2-135m") is None


HYBRID_TOKENS = 36
LENGTHS = (5, 19, 1, 40, 140, 8)
_SAMPLED: dict[str, Any] = {"num_tokens_to_generate": HYBRID_TOKENS, "termination_id": -1}
JOBS = [
    Job(
        prompt,
        greedy(HYBRID_TOKENS, seed=number)
        if number % 2
        else SamplingParams(temperature=0.9, seed=number, **_SAMPLED),
    )
    for number, prompt in enumerate(random_prompts(3, LENGTHS, VOCABULARY))
]
"""A job's number is its seed, by which drafters know it."""
ARRIVALS = {0: JOBS[:4], 3: JOBS[4:5], 9: JOBS[5:]}
ROOMY: dict[str, Any] = {"max_requests": 6}
EVICTIONS: dict[str, Any] = {
    "max_requests": 5, "max_tokens": 40, "num_kv_blocks": 26, "block_size_tokens": 8,
    "paused_buffer_size_gb": 1e-9,
}  # fmt: skip


@pytest.fixture(scope="module", params=HYBRID_MODELS, ids=lambda kind: kind.pattern)
def model(request: pytest.FixtureRequest) -> HybridAttentionModel:
    made: HybridAttentionModel = request.param()
    return made


@pytest.fixture(scope="module")
def serial(model: HybridAttentionModel) -> list[list[int]]:
    """Each request alone, without drafts."""
    engine = make_engine(model, lookahead=0, max_requests=1)
    found = [engine.generate([job.prompt], job.params)[0].generated_tokens for job in JOBS]
    engine.close()
    assert min(len(set(tokens)) for tokens in found) > 8, "a dull model hides wrong states"
    return found


def drafting_engine(
    model: HybridAttentionModel, serial: list[list[int]], drafter: str, count: int, **config: Any
) -> DynamicInferenceEngine:
    answers = [[*job.prompt, *tokens] for job, tokens in zip(JOBS, serial, strict=True)]
    engine = make_engine(
        model, drafter=DRAFTERS[drafter](answers, VOCABULARY), num_speculative_tokens=count,
        **config,
    )  # fmt: skip
    poison_states(engine)
    return engine


@pytest.mark.pairs
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize(
    ("drafter", "count"), [*((drafter, 3) for drafter in DRAFTERS), ("fickle", 1)]
)
def test_tokens_are_those_of_serial_plain_decoding(
    model: HybridAttentionModel, serial: list[list[int]], drafter: str, count: int, lookahead: int
) -> None:
    """With room, and with evictions.

    Break one of these, and it fails:

    - `flush_kernels.next_bases` and `next_bases.reference`: flush up to a row's last query token
      (`first + width - 1`)
    - `FlushRule.ring_length`: leave the widths out
    """
    seen: Counter[str] = Counter()
    for settings in (ROOMY, EVICTIONS):
        device = LateDevice() if settings is ROOMY else CpuDevice()
        engine = drafting_engine(
            model, serial, drafter, count, device=device, lookahead=lookahead, **settings
        )
        assert run_at(engine, ARRIVALS) == serial, settings
        seen.update({name: int(value) for name, value in engine.stats().items()})
        engine.close()
        assert_all_is_back(engine)
    assert seen["evictions"] > 0
    assert seen["drafted_tokens"] > 150
    assert (seen["accepted_tokens"] > 100) == (drafter != "wrong")
    assert seen["accepted_tokens"] > 0 or drafter == "wrong"


@pytest.mark.parametrize("lookahead", [1, 3])
def test_requests_beside_one_that_ends_unforeseen(model, serial, lookahead):
    """Inside a row, with more drafts accepted behind it."""
    jobs, wanted = [], []
    for number, (job, tokens) in enumerate(zip(JOBS, serial, strict=True)):
        at = tokens.index(tokens[3 + 3 * number])
        jobs.append(Job(job.prompt, replace(job.params, stop_token_ids=[tokens[at]])))
        wanted.append(tokens[: at + 1])
    engine = drafting_engine(model, serial, "oracle", 3, lookahead=lookahead, max_requests=3)
    assert run_at(engine, {0: jobs}) == wanted
    engine.close()


def test_captured_steps(model: HybridAttentionModel, serial: list[list[int]]) -> None:
    engine = drafting_engine(
        model, serial, "fickle", 3, device=CapturingCpu(), lookahead=2, num_cuda_graphs=3, **ROOMY
    )
    assert run_at(engine, ARRIVALS) == serial
    assert engine.stats()["captured_steps"] > 20
