"""Structured output with steps in flight: equal to serial, valid, and nobody else waits for it."""

import json
import re
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams, Status, StructuredOutput
from megatron_async.devices.cpu import Chaos, CpuDevice, CpuStream
from megatron_async.errors import RequestError
from megatron_async.text.tokenizer import Tokenizer
from tests.support.harness import (
    EngineFactory,
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    random_prompts,
    run_alone,
    run_at,
)
from tests.support.letter_tokenizers import EOS, make_ascii_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
REGEX = r"(\d{3}-){1,4}[a-f]{5}"
CHOICE = ["red", "green (dark)", "[blue]"]
PRESSURE = {"num_kv_blocks": 18, "block_size_tokens": 8, "max_tokens": 24}


@pytest.fixture(scope="module")
def ascii_tokenizer() -> Tokenizer:
    return make_ascii_tokenizer()


def constrained(seed: int, output: StructuredOutput, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 1.0,
            "seed": seed,
            "num_tokens_to_generate": 90,
            "structured_output": output,
            **changes,
        }
    )


PARAMS = [
    constrained(1, StructuredOutput(json_schema=SCHEMA)),
    greedy(50),
    constrained(2, StructuredOutput(regex=REGEX), frequency_penalty=1.0),
    constrained(3, StructuredOutput(choice=CHOICE), return_log_probs=True),
    constrained(4, StructuredOutput(json_schema=json.dumps(SCHEMA)), top_k=5, temperature=2.0),
    SamplingParams(temperature=1.0, seed=8, num_tokens_to_generate=60, termination_id=-1),
    constrained(5, StructuredOutput(regex=REGEX), bad_words=[[ord("1")]], temperature=0.0),
    constrained(
        6, StructuredOutput(grammar='start: "(" /[a-z]{2}/ ("," /[a-z]{2}/)* ")"'),
        num_tokens_to_generate=40,
    ),
]  # fmt: skip
PROMPTS = random_prompts(2, [3, 17, 30, 9, 5, 12, 21, 8], EOS)
JOBS = [Job(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def compile_grammars(engine: DynamicInferenceEngine, params: list[SamplingParams]) -> None:
    """Compile ahead: requests are admitted at once, and their schedules are the same in every
    run."""
    for each in params:
        if each.structured_output is not None:
            engine.grammars.begin(each.structured_output).result()


def check_valid(text: str, reason: str, output: StructuredOutput) -> None:
    if output.choice:
        assert text in CHOICE
    elif output.regex and reason != "length":
        assert re.fullmatch(REGEX, text)
    elif output.json_schema and reason != "length":
        found = json.loads(text)
        assert set(found) == {"name", "sizes"}
        assert re.fullmatch("[a-z]{0,8}", found["name"])
        assert len(found["sizes"]) <= 3


@pytest.fixture(scope="module")
def serial_tokens(tiny_model: torch.nn.Module, ascii_tokenizer: Tokenizer) -> list[list[int]]:
    engine = make_engine(tiny_model, lookahead=0, tokenizer=ascii_tokenizer)
    tokens = run_alone(engine, JOBS)
    engine.close()
    assert_all_is_back(engine)
    return tokens


@pytest.mark.pairs
@pytest.mark.parametrize("memory", [{}, PRESSURE], ids=["room", "pressure"])
def test_equal_to_serial_and_valid(
    make_tiny_engine: EngineFactory,
    ascii_tokenizer: Tokenizer,
    serial_tokens: list[list[int]],
    lookahead: int,
    memory: dict[str, int],
    invalidation: str,
) -> None:
    engine = make_tiny_engine(
        lookahead=lookahead, tokenizer=ascii_tokenizer, invalidation=invalidation,
        device=CpuDevice(Chaos(seed=lookahead, probability=0.2, max_delay_s=0.002)), **memory,
    )  # fmt: skip
    compile_grammars(engine, PARAMS)
    futures = []
    for number, job in enumerate(JOBS):
        futures.append(engine.add_request(number, job.prompt, job.params))
        if number % 3 == 2:
            engine.step_modern()
    drain(engine)
    for future, tokens in zip(futures, serial_tokens, strict=True):
        request = future.result()
        assert request.error is None
        assert request.generated_tokens == tokens
        output = request.sampling_params.structured_output
        if output is not None:
            check_valid(request.generated_text, request.finish_reason, output)
    stats = engine.stats()
    assert bool(stats["evictions"]) == bool(memory)
    if invalidation == "reconcile":
        assert stats["overlap_ratio"] >= (0.9 if memory else 1.0) * bool(lookahead)


@pytest.mark.parametrize("seed", range(4))
def test_masks_that_arrive_late(make_tiny_engine, ascii_tokenizer, serial_tokens, seed: int):
    """A step's first masks are still on their way when its last ones are sent: its rows wait each
    for their own."""
    device = CpuDevice(Chaos(seed, probability=0.0))
    device.upload = CpuStream("upload", Chaos(seed, probability=0.3, max_delay_s=0.02))
    engine = make_tiny_engine(lookahead=2, tokenizer=ascii_tokenizer, device=device, **PRESSURE)
    compile_grammars(engine, PARAMS)
    assert run_at(engine, {0: JOBS}) == serial_tokens


def test_the_next_forward_is_launched_before_the_token_is_known(
    make_tiny_engine: EngineFactory, ascii_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's first part is launched, then the token before it is booked, then its masks go out;
    and all that before the step after it is launched."""
    engine = make_tiny_engine(lookahead=1, tokenizer=ascii_tokenizer)
    controller, events = engine.controller, []
    launch, finish = controller.enqueue_step, controller.sample_constrained
    book = engine.booking.book

    def watched(name: str, call: Any) -> Any:
        def note(step: Any, *args: Any, **options: Any) -> Any:
            plan = getattr(step, "plan", step)
            events.append((name, plan.step))
            return call(step, *args, **options)

        return note

    controller.enqueue_step = watched("launch", launch)
    controller.sample_constrained = watched("masks", finish)
    engine.booking.book = watched("book", book)
    run_at(engine, {0: [JOBS[2]]})
    for step in range(2, 10):
        order = [events.index(event) for event in (
            ("launch", step), ("book", step - 1), ("masks", step), ("launch", step + 1),
        )]  # fmt: skip
        assert order == sorted(order), events


def test_others_run_at_full_speed(make_tiny_engine, ascii_tokenizer: Tokenizer):
    """With two steps ahead a constrained request sits out every third step; the others do not."""
    engine = make_tiny_engine(lookahead=2, tokenizer=ascii_tokenizer)
    limited = constrained(2, StructuredOutput(regex="[ab]{30}"))
    compile_grammars(engine, [limited])
    slow = engine.add_request(0, PROMPTS[2], limited)
    fast = engine.add_request(1, PROMPTS[1], greedy(30))
    drain(engine)
    assert engine.stats()["overlap_ratio"] == 1.0
    assert slow.result().generated_length == fast.result().generated_length == 30
    assert engine.stats()["steps"] <= 48
    assert fast.result().latency < slow.result().latency


BAD: list[Any] = [
    "json", 1, {"json_schema": {}}, ["a"], True, 0.5,
    StructuredOutput(),
    StructuredOutput(regex="a", choice=["b"]),
    StructuredOutput(json_schema="{"),
    StructuredOutput(json_schema="[1]"),
    StructuredOutput(json_schema=5),
    StructuredOutput(json_schema={"type": "nothing"}),
    StructuredOutput(json_schema={"type": "string", "pattern": "("}),
    StructuredOutput(json_schema={"x": {1, 2}}),
    StructuredOutput(regex="("),
    StructuredOutput(regex=""),
    StructuredOutput(regex=7),
    StructuredOutput(regex="(?<=a)b"),
    StructuredOutput(grammar="start: missing"),
    StructuredOutput(grammar="not a grammar ["),
    StructuredOutput(grammar=""),
    StructuredOutput(grammar=["start"]),
    StructuredOutput(choice=[]),
    StructuredOutput(choice="red"),
    StructuredOutput(choice=["red", 1]),
    StructuredOutput(choice=[""]),
]  # fmt: skip


def test_bad_ones_fail_alone(make_tiny_engine: EngineFactory, ascii_tokenizer: Tokenizer) -> None:
    assert len(BAD) >= 20
    engine = make_tiny_engine(lookahead=1, tokenizer=ascii_tokenizer)
    served = engine.add_request(1000, PROMPTS[3], PARAMS[3])
    for number, output in enumerate(BAD):
        params = constrained(0, output)
        future = engine.add_request(number, PROMPTS[0], params)
        while not future.done():
            engine.step_modern()
        request = future.result()
        assert request.status == Status.FAILED, output
        assert isinstance(request.error, RequestError), (output, request.error)
        assert any(
            word in str(request.error)
            for word in ("structured_output", "json_schema", "regex", "grammar", "choice")
        )
        engine.step_modern()
    drain(engine)
    assert served.result().generated_text in CHOICE


def test_without_a_tokenizer(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine()
    request = engine.add_request(0, [1], PARAMS[2]).result()
    assert isinstance(request.error, RequestError)
    assert "tokenizer" in str(request.error)
    drain(engine)


A, B = [ord("a")], [ord("b")]


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({"structured_output": StructuredOutput(regex="[ab]{9}"), "bad_words": [A, B]},
         "the grammar (structured_output) and bad_words leave none together: relax one of them"),
        ({"structured_output": StructuredOutput(choice=["ab"]), "bad_words": ["ab"]},
         "the grammar (structured_output) and bad_words leave none together: relax one of them"),
        ({"structured_output": StructuredOutput(regex="a?b?"), "bad_words": [A, B],
          "min_tokens": 3},
         "the grammar (structured_output), bad_words and min_tokens leave none together"),
    ],
)  # fmt: skip
def test_nothing_left_to_sample_fails_alone(
    make_tiny_engine: EngineFactory, ascii_tokenizer: Tokenizer, wishes: dict[str, Any], named: str
) -> None:
    engine = make_tiny_engine(lookahead=1, tokenizer=ascii_tokenizer)
    params = SamplingParams(temperature=1.0, seed=0, num_tokens_to_generate=90, **wishes)
    stuck = engine.add_request(0, PROMPTS[0], params)
    served = engine.add_request(1, PROMPTS[3], PARAMS[3])
    drain(engine)
    error = str(stuck.result().error)
    assert named in error
    assert "NaN" not in error
    assert served.result().generated_text in CHOICE


def test_a_grammar_that_gives_up_fails_alone(make_tiny_engine, ascii_tokenizer: Tokenizer):
    """Masks are made while steps are launched: an exception there must not leave one half done."""

    class GivesUp:
        def __init__(self, matcher: Any) -> None:
            self.consume_token, self.is_stopped = matcher.consume_token, matcher.is_stopped

        def unsafe_compute_mask_ptr(self, *_: int) -> None:
            raise RuntimeError("too complex")

    engine = make_tiny_engine(lookahead=1, tokenizer=ascii_tokenizer)
    failing = engine.add_request(0, PROMPTS[0], constrained(0, StructuredOutput(regex="[ab]{9}")))
    served = engine.add_request(1, PROMPTS[3], PARAMS[3])
    while engine.requests.get(0).grammar is None:
        engine.step_modern()
    grammar = engine.requests.get(0).grammar
    grammar._matcher = GivesUp(grammar._matcher)
    drain(engine)
    assert "too complex" in str(failing.result().error)
    assert served.result().generated_text in CHOICE
