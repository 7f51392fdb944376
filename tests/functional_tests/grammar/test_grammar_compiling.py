"""Requests whose grammars compile, crash, never end or are slow: nobody else notices."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from megatron_async import LLM, Status, StructuredOutput
from megatron_async.errors import RequestAborted, RequestError
from megatron_async.serving.replica import Replica, serve_replica
from megatron_async.text import grammar_compiler, grammar_limits, structured_output
from megatron_async.text.grammar_compiler import GrammarCompiler
from tests.support.harness import EngineFactory, drain, greedy, make_engine, make_model
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.memory_channel import FollowingEngine

LOOKAHEADS = pytest.mark.parametrize("lookahead", [0, 1, 2])
ENDLESS = StructuredOutput(json_schema={"type": "integer", "multipleOf": 9999991})
CHAIN = StructuredOutput(
    grammar="start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'
)
GOOD = StructuredOutput(regex="[ab]{12}")
AMBIGUOUS = StructuredOutput(grammar='start: s\ns: "a" | s s | s s s')


def limited(output: StructuredOutput, tokens: int = 30) -> Any:
    return greedy(tokens, structured_output=output)


@LOOKAHEADS
def test_bad_grammars_hold_up_nobody(make_tiny_engine, lookahead, monkeypatch):
    """A crash, a compile that never ends, and one that is aborted: the others are served while
    these compile, and good grammars besides."""
    monkeypatch.setattr(grammar_limits, "MAX_RULES", 10**9)
    engine = make_tiny_engine(lookahead=lookahead, tokenizer=make_ascii_tokenizer())
    engine.grammars.limit_s = 2.0
    endless = engine.add_request(0, [1, 2], limited(ENDLESS))
    crash = engine.add_request(1, [1, 2], limited(CHAIN))
    aborted = engine.add_request(2, [1, 2], limited(ENDLESS))
    good = engine.add_request(3, [1, 2], limited(GOOD))
    plain = engine.add_request(4, [1, 2], greedy(20))
    engine.abort_request(2)
    assert isinstance(aborted.result().error, RequestAborted)
    assert len(engine.context.waiting) == 1  # the scheduler knows of the plain one alone
    while not (plain.done() and good.done()):
        engine.step_modern()
    assert not endless.done()
    assert plain.result().generated_length == 20
    assert good.result().generated_length == 12
    drain(engine)
    assert "CPU time" in str(endless.result().error)
    assert "SIG" in str(crash.result().error)
    assert not engine.has_unfinished_requests()
    engine.close()


@LOOKAHEADS
def test_streams_and_futures_come_while_others_compile(make_tiny_engine, lookahead):
    engine = make_tiny_engine(lookahead=lookahead, tokenizer=make_ascii_tokenizer())
    engine.grammars.limit_s = 2.0

    async def run() -> None:
        runner = asyncio.create_task(engine.run_engine())
        endless = engine.add_request(0, [1, 2], limited(ENDLESS))
        good = engine.add_request(1, [1, 2], limited(GOOD))
        tokens = [token async for chunk in engine.stream(1) for token in chunk.tokens]
        assert tokens == good.result().generated_tokens
        again = engine.add_request(2, [1, 2], limited(GOOD))  # compiled already: joins at once
        assert len(engine.context.waiting) == 1
        assert (await again).generated_tokens == tokens
        assert not endless.done()
        assert (await endless).status == Status.FAILED
        runner.cancel()

    asyncio.run(run())


def test_a_closed_engine_leaves_no_process(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(lookahead=1, tokenizer=make_ascii_tokenizer())
    waits = engine.add_request(0, [1, 2], limited(ENDLESS))
    while not (engine.grammars._checkers and engine.grammars._checkers[0]._process):
        time.sleep(0.01)
    process = engine.grammars._checkers[0]._process
    engine.close()
    assert process.poll() is not None
    assert isinstance(waits.result().error, RequestAborted)
    assert engine.requests.take_ended() == [waits.result()]


@LOOKAHEADS
def test_masks_that_cost_too_much_end_their_request_alone(
    make_tiny_engine: EngineFactory,
    lookahead: int,
    invalidation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_tiny_engine(
        lookahead=lookahead, tokenizer=make_ascii_tokenizer(), invalidation=invalidation
    )
    plain = engine.add_request(0, [1, 2], greedy(40))
    slow = engine.add_request(1, [1, 2], limited(GOOD))
    while (grammar := engine.requests.get(1).grammar) is None:
        engine.step_modern()
    grammar.behind_s = structured_output.CREDIT_S + 1.0
    drain(engine)
    assert isinstance(slow.result().error, RequestError)
    assert "takes too long" in str(slow.result().error)
    assert slow.result().generated_length < 12
    assert plain.result().generated_length == 40
    engine.close()


def test_an_ambiguous_grammar_exceeds_its_allowance_and_usual_ones_do_not() -> None:
    compiler = GrammarCompiler(make_ascii_tokenizer(), 128)
    mask = np.zeros(4, dtype=np.int32)
    usual = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
    for output, is_slow in ((AMBIGUOUS, True), (StructuredOutput(json_schema=usual), False)):
        grammar = compiler.start(compiler.begin(output).result())
        for number in range(2000):
            grammar.mask(mask)
            if grammar.is_too_slow:
                break
            token = "a" if is_slow else '{"a": "' + "x" * 2000
            grammar.accept(ord(token[0] if is_slow else token[number]))
        assert grammar.is_too_slow == is_slow
    compiler.close()


def test_a_follower_has_the_grammars_of_its_leader() -> None:
    """Good ones, bad ones, aborted ones, and one whose masks cost too much."""
    model, tokenizer = make_model(), make_ascii_tokenizer()
    leader = make_engine(model, num_kv_blocks=32, lookahead=1, tokenizer=tokenizer)
    follower = make_engine(model, num_kv_blocks=32, lookahead=1, tokenizer=tokenizer)
    following = FollowingEngine(leader, follower)
    leader.grammars.limit_s = 1.0
    outputs = [GOOD, StructuredOutput(regex="("), StructuredOutput(choice=["red", "blue"]), ENDLESS]
    futures = [leader.add_request(n, [1, 2], limited(o)) for n, o in enumerate(outputs)]
    aborted = leader.add_request(7, [1, 2], limited(StructuredOutput(regex="[ab]{13}")))
    leader.abort_request(7)
    slow = leader.add_request(8, [1, 2], limited(StructuredOutput(regex="[ab]{20}")))
    while (grammar := leader.requests.get(8).grammar) is None:
        leader.step_modern()
    grammar.behind_s = structured_output.CREDIT_S + 1.0
    drain(leader)
    assert isinstance(aborted.result().error, RequestAborted)
    assert "takes too long" in str(slow.result().error)
    assert [future.result().status for future in futures] == [
        Status.COMPLETED, Status.FAILED, Status.COMPLETED, Status.FAILED,
    ]  # fmt: skip
    leader.close()
    following.join()
    assert following.error is None, following.error
    for number in (0, 2):
        theirs = following.ended[number].generated_tokens
        assert theirs == futures[number].result().generated_tokens
    assert following.ended[8].generated_tokens == slow.result().generated_tokens
    assert follower.stats()["steps"] == leader.stats()["steps"]


def test_compiled_grammars_are_kept_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(make_ascii_tokenizer(), 256)
    small = StructuredOutput(regex="a{3}")
    large = StructuredOutput(choice=[f"this is choice {i}" for i in range(2000)])
    first = StructuredOutput(regex="a")  # some of its bytes are the library's, for all
    sizes = [compiler.begin(one).result().size for one in (first, large, small)]
    assert 0 < sizes[2] < 200_000 < sizes[1] < 20_000_000
    kept = compiler.begin(large)
    assert compiler.begin(StructuredOutput(regex="b")).result()
    assert compiler.begin(large) is kept
    monkeypatch.setattr(grammar_compiler, "KEPT_BYTES", sizes[1] - 1)
    compiler.begin(StructuredOutput(regex="c")).result()  # the oldest go until the rest fits
    again = compiler.begin(large)
    assert again is not kept
    assert again.result().size > 200_000
    compiler.close()


def test_a_tokenizer_is_read_once_and_before_if_asked(make_tiny_engine, monkeypatch):
    engine = make_tiny_engine(lookahead=1, tokenizer=make_ascii_tokenizer())
    engine.grammars.prepare()
    monkeypatch.setattr(grammar_compiler, "make_tokenizer", None)
    engine.grammars.prepare()
    good = engine.add_request(0, [1, 2], limited(GOOD))
    drain(engine)
    assert good.result().generated_length == 12


def test_a_tokenizer_that_cannot_be_read_fails_each_grammar_and_nothing_else(
    make_tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any) -> Any:
        raise ValueError("no such pre-tokenizer")

    monkeypatch.setattr(grammar_compiler, "make_tokenizer", unreadable)
    engine = make_tiny_engine(lookahead=1, tokenizer=make_ascii_tokenizer())
    engine.grammars.prepare()
    futures = [engine.add_request(number, [1, 2], limited(GOOD)) for number in range(2)]
    plain = engine.add_request(2, [1, 2], greedy(5))
    drain(engine)
    for future in futures:
        assert "no such pre-tokenizer" in str(future.result().error)
    assert plain.result().generated_length == 5
    without = make_tiny_engine(lookahead=1)
    without.grammars.prepare()
    refused = without.add_request(0, [1, 2], limited(GOOD))
    assert "needs a megatron_async Tokenizer" in str(refused.result().error)
    drain(without)


def test_a_replica_reads_its_tokenizer_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    make_tokenizer = grammar_compiler.make_tokenizer

    def watched(*description: Any) -> Any:
        read.append(make_tokenizer(*description))
        return read[-1]

    async def run(replica: Replica) -> None:
        served.append(len(read))

    served: list[int] = []
    monkeypatch.setattr(grammar_compiler, "make_tokenizer", watched)
    monkeypatch.setattr(Replica, "run", run)
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=8, max_sequence_length=128) as llm:
        llm.engine.grammars = GrammarCompiler(make_ascii_tokenizer(), 128)
        serve_replica(llm, "ipc:///tmp/nobody-there", "tiny")
    assert served == [1]
