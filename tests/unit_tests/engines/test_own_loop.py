"""A loop of one's own, of the engine's public parts: `launch_step` and `resolve_step`."""

import pytest

from tests.unit_tests.engines.engines_under_test import GREEDY, PROMPTS


@pytest.fixture(params=[0, 1, 2])
def engine(make_engine, request):
    return make_engine(lookahead=request.param)


def add_all(engine):
    return [engine.add_request(number, prompt, GREEDY) for number, prompt in enumerate(PROMPTS)]


def finish(engine):
    while engine.has_unfinished_requests():
        engine.step_modern()


def test_it_says_the_same_tokens(engine, expected):
    futures, launched, booked = add_all(engine), 0, []
    while engine.has_unfinished_requests():
        if engine.launch_step() is not None:
            launched += 1
        else:
            booked += engine.resolve_step()
        engine.requests.take_ended()
    assert [future.result().generated_tokens for future in futures] == expected
    assert [output.step for output in booked] == list(range(launched))


def test_a_step_comes_behind_those_in_flight_while_there_is_room(engine):
    add_all(engine)
    launched = [engine.launch_step() for _ in range(engine.lookahead + 1)]
    assert list(engine.in_flight) == launched
    assert engine.launch_step() is None  # the rings of buffers are full
    assert list(engine.in_flight) == launched
    (output,) = engine.resolve_step()
    assert output.step == launched[0].plan.step
    assert list(engine.in_flight) == launched[1:]
    assert engine.launch_step() is engine.in_flight[-1]
    finish(engine)


def test_where_nothing_can_be_done_nothing_is(engine):
    assert engine.launch_step() is None
    with pytest.raises(IndexError):
        engine.resolve_step()
    add_all(engine)
    engine.pause()
    assert engine.launch_step() is None
    engine.unpause()
    assert engine.launch_step() is not None
    finish(engine)
    engine.close()
    assert engine.launch_step() is None
