"""Who listens to an engine is told of each moment, one after the other, in their order."""

import pytest

from megatron_async.engine.listener import EngineListener
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS


class Notes(EngineListener):
    """Writes down what it is told, into a list that it shares."""

    def __init__(self, name, told):
        self.name = name
        self.told = told

    def added(self, request):
        self.told.append((self.name, "added", request.request_id))

    def aborted(self, request_id):
        self.told.append((self.name, "aborted", request_id))

    def evicted_all(self):
        self.told.append((self.name, "evicted_all", None))

    def launching(self, plan):
        self.told.append((self.name, "launching", plan.step))

    def launched(self, plan):
        self.told.append((self.name, "launched", None if plan is None else plan.step))

    def resolved(self, step):
        self.told.append((self.name, "resolved", step.plan.step))

    def ended(self, request, reason):
        self.told.append((self.name, "ended", request.request_id))


def of(told, name, moment):
    return [what for who, when, what in told if (who, when) == (name, moment)]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_all_are_told_in_order(make_engine, lookahead):
    engine, told = make_engine(lookahead=lookahead), []
    engine.listeners += [Notes("first", told), Notes("second", told)]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(number, prompt, GREEDY)
    engine.step_modern()
    engine.abort_request(0)
    engine.suspend(free_kv_cache=True)
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    first, second = told[::2], told[1::2]
    assert {who for who, *_ in first} == {"first"}
    assert [what for _, *what in first] == [what for _, *what in second]
    others = list(range(1, len(PROMPTS)))
    assert of(told, "first", "added") == [0, *others]
    assert of(told, "first", "aborted") == [0]
    assert of(told, "first", "evicted_all") == [None]
    steps = list(range(engine.statistics.steps))
    assert [step for step in of(told, "first", "launched") if step is not None] == steps
    assert of(told, "first", "launching") == steps
    assert of(told, "first", "resolved") == steps
    assert sorted(of(told, "first", "ended")) == others
    engine.listeners.pop()
    heard = len(of(told, "second", "added"))
    engine.generate(PROMPTS[:1], GREEDY)
    assert len(of(told, "second", "added")) == heard
    assert len(of(told, "first", "added")) == heard + 1
