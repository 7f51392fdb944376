"""An admission that raises leaves nothing half done: all requests wait, and are served later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.planning import request_slots
from tests.support.harness import (
    EngineFactory,
    drain,
    fail_call,
    greedy,
    make_engine,
    random_prompts,
)

TOKENS = 12
PROMPTS = random_prompts(71, (5, 9, 18, 7))
POOL = {"max_requests": 3, "num_kv_blocks": 24, "block_size_tokens": 8}

PLACES: dict[str, Callable[[DynamicInferenceEngine], tuple[Any, str]]] = {
    "stop tokens": lambda engine: (request_slots.np, "pad"),
    "sampling": lambda engine: (engine.context.slots, "_set_stop_ids"),
    "blocks": lambda engine: (engine.context.blocks, "allocate"),
    "block updates": lambda engine: (engine.context._plan_builder, "add_block_updates"),
    "event": lambda engine: (engine.get_request(1), "add_event"),
}


@pytest.fixture(scope="module")
def params() -> list[Any]:
    """Request 1, the first to be admitted late, makes the array of stop tokens grow."""
    return [
        greedy(TOKENS),
        greedy(TOKENS, stop_token_ids=[1]),
        greedy(TOKENS, stop_token_ids=list(range(9)), min_tokens=TOKENS),
        greedy(TOKENS),
    ]


@pytest.fixture(scope="module")
def expected(tiny_model: torch.nn.Module, params: list[Any]) -> list[list[int]]:
    """What the requests say where nothing raises."""
    engine = make_engine(tiny_model, lookahead=0, **POOL)
    found = [request.generated_tokens for request in engine.generate(PROMPTS, params)]
    engine.close()
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_an_admission_that_raises_is_made_later(
    make_tiny_engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    params: list[Any],
    expected: list[list[int]],
    lookahead: int,
    place: str,
    error: type[BaseException],
) -> None:
    """Break one of these, and it fails:

    - `mending.mend`: no `start_again`
    - `Turn.__exit__`: no `_make_whole`
    """
    engine = make_tiny_engine(lookahead=lookahead, **POOL)
    futures = [engine.add_request(0, PROMPTS[0], params[0])]
    for _ in range(3):
        engine.step_modern()
    futures += [engine.add_request(n, PROMPTS[n], params[n]) for n in (1, 2, 3)]

    def raises(*_: Any, **__: Any) -> None:
        raise error(place)

    owner, name = PLACES[place](engine)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raises)
            with pytest.raises(error, match=place):
                engine.step_modern()
        engine.context.check_integrity()
        assert len(engine.context.waiting) == 4
        assert engine.context.slots.num_free == 3
    drain(engine)
    assert [future.result().generated_tokens for future in futures] == expected


def test_the_last_of_several_admissions_raises(make_tiny_engine, lookahead):
    """The first one waits again, and may be aborted before the next plan: its slot's next owner has
    a table of its own. Break `start_again`: keep the block updates for the next plan."""
    serial = make_tiny_engine(lookahead=0, **POOL)
    expected = [r.generated_tokens for r in serial.generate(PROMPTS, greedy(TOKENS))]
    engine = make_tiny_engine(lookahead=lookahead, **POOL)
    fail_call(engine.context.blocks, "allocate", 2, MemoryError)
    first = engine.add_request(0, PROMPTS[2], greedy(TOKENS))
    futures = [engine.add_request(n, PROMPTS[n], greedy(TOKENS)) for n in (1, 2, 3)]
    with pytest.raises(MemoryError):
        engine.step_modern()
    engine.context.check_integrity()
    assert len(engine.context.waiting) == 4
    engine.abort_request(0)
    assert first.result().failed()
    stale = engine.context._plan_builder._updates
    assert not stale
    drain(engine)
    assert [future.result().generated_tokens for future in futures] == expected[1:]
