"""Reports of drafts, and the widths that follow from them: wide where it pays, and hardly a step
lost where it does not."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from megatron_async.observe.draft_statistics import DraftStatistics
from megatron_async.observe.verified_drafts import FewerDrafts
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning import draft_books
from megatron_async.planning.draft_books import (
    ONE,
    DraftBooks,
    ExpectedGain,
    extra_time,
    is_wide_worth_it,
)
from megatron_async.planning.plan_builder import dummy_plan
from megatron_async.planning.request_slots import RequestSlots, SlotState

LONG = 10**6


def decoding_slots(rows, drafts):
    slots = RequestSlots(rows, 64, 8, max_width=drafts + 1)
    slots.state[:] = SlotState.DECODING
    slots.drafts[:] = drafts
    slots.max_length[:] = LONG
    slots.num_known[:] = 10
    return slots


def plan_of(slots, width, short_of_blocks=False):
    rows = np.arange(slots.capacity)
    return replace(
        dummy_plan(BatchDimensions(slots.capacity, width=width)),
        num_decode=slots.capacity,
        slots=rows,
        generations=slots.generation.copy(),
        widths=slots.widths_of(rows, width),
        produces=np.ones(slots.capacity, dtype=np.bool_),
        short_of_blocks=short_of_blocks,
    )


def reports(rows, drafts, found):
    """Drafts of token 7, `found` of each row."""
    return np.where(np.arange(drafts) < np.broadcast_to(found, rows)[:, None], 7, -1)


def served(rng, drafts, lookahead, found, right, stays, tokens, width=None):
    """Play one request; its tokens and the time in narrow steps that the model of `width_choice`
    gives. `found` is the share of steps with drafts, `right` how often a draft is right, each
    behind those before it, `stays` how much longer than by chance a stretch with drafts lasts;
    `width` None: as it is chosen."""
    slots = decoding_slots(1, drafts)
    books, in_flight = DraftBooks(slots, drafts, True), deque()
    everyone, done, time, has = np.ones(1, dtype=np.bool_), 0, 0.0, False
    while done < tokens:
        chosen = width or books.width_for(everyone)
        count = 1
        while has and count < chosen and rng.random() < right:
            count += 1
        first = 7 if count > 1 or (has and chosen == 1 and rng.random() < right) else 8
        has = rng.random() < (found if not has else found + (1 - found) * stays)
        sampled = np.full((1, drafts + 1), first)
        in_flight.append((plan_of(slots, chosen), sampled, np.array([count]), has))
        time += 1 + (chosen > 1) * extra_time(1, drafts + 1) / ONE
        done += count
        if len(in_flight) > lookahead:
            plan, sampled, counts, had = in_flight.popleft()
            books.book(plan, sampled, counts, reports(1, drafts, drafts * had))
    return done, time


@pytest.mark.parametrize("drafts", [1, 3])
def test_little_is_lost_and_much_is_won(drafts, lookahead):
    """However often there are drafts, and however often they are right. With `LEARNING_SHIFT` 6
    requests of 192 tokens lose 5 %."""
    rng = np.random.default_rng(0)
    for found in (0.05, 0.4, 1.0):
        for right in (0.0, 0.05, 0.2, 0.7, 0.95):
            for stays in (0.0, 0.8):
                tokens = time = 0.0
                for _ in range(4):
                    more = served(rng, drafts, lookahead, found, right, stays, 192)
                    tokens, time = tokens + more[0], time + more[1]
                assert tokens / time > 0.975, (found, right, stays)
                if found == 1 and right > 0.6:
                    always = served(rng, drafts, lookahead, found, right, stays, 1500, drafts + 1)
                    assert tokens / time > 0.9 * always[0] / always[1], (found, right, stays)


def test_a_new_owner_begins_anew():
    slots = decoding_slots(2, 3)
    books, everyone = DraftBooks(slots, 3, True), np.ones(2, dtype=np.bool_)
    assert books.width_for(everyone) == 1  # nothing is known
    books.book(plan_of(slots, 1), np.full((2, 4), 5), np.ones(2, int), reports(2, 3, [3, 3]))
    assert books.width_for(everyone) == 4
    stale = plan_of(slots, 4)
    slots.generation[:] += 1
    assert books.width_for(everyone) == 1
    # A step of the former owner tells nothing of the new one.
    found = books.book(stale, np.full((2, 4), 7), np.full(2, 4), reports(2, 3, [3, 3]))
    assert len(found.drafted) == 0
    assert books.width_for(everyone) == 1
    books.book(plan_of(slots, 1), np.full((2, 4), 5), np.ones(2, int), reports(2, 3, [0, 0]))
    assert books.width_for(everyone) == 1


@pytest.mark.parametrize("seed", range(20))
def test_few_rows_are_booked_as_many(seed, monkeypatch):
    """One by one and as arrays: random steps, owners that change, rows that produce nothing."""
    rng = np.random.default_rng(seed)
    slots = decoding_slots(4, 3)
    slots.drafts[:] = rng.integers(0, 5, 4)
    slots.features[0] = rng.choice([0, RowFeature.CONSTRAINED])
    slots.max_length[:] = slots.num_known + rng.integers(1, 60, 4)
    few, many = (DraftBooks(slots, 3, True) for _ in range(2))
    for _ in range(60):
        width, decoding = int(rng.choice([1, 4])), int(rng.integers(0, 5))
        plan = replace(
            plan_of(slots, width, bool(rng.random() < 0.2)),
            num_decode=decoding,
            produces=(np.arange(4) < decoding) | (rng.random(4) < 0.5),
            slots=rng.permutation(4),
        )
        plan = replace(plan, generations=slots.generation[plan.slots])
        slots.generation[rng.random(4) < 0.1] += 1
        sampled, counts = rng.integers(-1, 3, (4, 4)), rng.integers(0, width + 1, 4)
        most = np.where(slots.features & RowFeature.CONSTRAINED, 0, slots.drafts)[plan.slots]
        found = np.minimum(rng.integers(0, 4, 4), most)
        drafts = np.where(np.arange(3) < found[:, None], rng.integers(0, 3, (4, 3)), -1)
        verified = []
        for books, limit in ((few, 4), (many, 0)):
            monkeypatch.setattr(draft_books, "FEW_ROWS", limit)
            verified.append(books.book(plan, sampled, counts, drafts))
        assert [part.tolist() for part in verified[0]] == [part.tolist() for part in verified[1]]
        known = few._generation == slots.generation
        assert np.array_equal(few._generation, many._generation)
        assert np.array_equal(few._entries[:, known], many._entries[:, known])
        slots.num_known[:] += rng.integers(0, 3, 4)


def test_beside_rows_of_requests_that_have_ended():
    """Each report is its own row's."""
    slots = decoding_slots(3, 3)
    books = DraftBooks(slots, 3, True)
    plan = plan_of(slots, 1)
    slots.generation[1] += 1
    given = reports(3, 3, [1, 3, 2])
    books.book(plan, np.full((3, 4), 5), np.ones(3, int), given)
    found = books.book(plan_of(slots, 4), np.full((3, 4), 7), np.full(3, 4), given)
    assert found.drafted.tolist() == [1, 0, 2]


def test_a_drafter_that_was_passed_in_is_always_verified():
    slots = decoding_slots(2, 3)
    books = DraftBooks(slots, 3, chooses_widths=False)
    assert books.width_for(np.ones(2, dtype=np.bool_)) == 4


def test_why_rows_have_fewer_drafts():
    """One row for each reason."""
    slots = decoding_slots(6, 3)
    slots.features[0] = RowFeature.CONSTRAINED
    slots.drafts[:2] = 0, 1
    slots.max_length[2] = slots.num_known[2] + 3  # the last of these is never fed
    everyone = np.ones(6, dtype=np.bool_)
    books, statistics = DraftBooks(slots, 3, True), DraftStatistics(3)
    first = books.book(plan_of(slots, 1), np.full((6, 4), 5), np.ones(6, int),
                       reports(6, 3, [0, 1, 3, 2, 3, 3]))  # fmt: skip
    assert first.drafted.tolist() == [0] * 6
    assert books.width_for(everyone) == 4
    counts = np.array([1, 2, 2, 4, 4, 1])
    found = books.book(plan_of(slots, 4), np.full((6, 4), 7), counts, reports(6, 3, 3))
    assert found.drafted.tolist() == [0, 1, 2, 2, 3, 3]
    # A sample may be the token that stands for "no draft": no draft was right there.
    assert found.accepted.tolist() == [0, 1, 1, 2, 3, 0]
    wanted = {FewerDrafts.GRAMMAR: 1, FewerDrafts.REQUEST: 1, FewerDrafts.LENGTH: 1,
              FewerDrafts.NOTHING_FOUND: 1}  # fmt: skip
    assert found.fewer(3).tolist() == [wanted.get(reason, 0) for reason in FewerDrafts]
    for short, reason in ((True, FewerDrafts.BLOCKS), (False, FewerDrafts.NARROW_STEP)):
        narrow = plan_of(slots, 1, short)
        less = books.book(narrow, np.full((6, 4), 7), np.ones(6, int), reports(6, 3, 3))
        assert less.fewer(3)[reason] == 5
        assert less.fewer(3).sum() == 6
    statistics.count(found)
    stats = statistics.as_dict()
    assert [stats[f"drafted_tokens_at_{n}"] for n in (1, 2, 3)] == [5, 4, 2]
    assert [stats[f"accepted_tokens_at_{n}"] for n in (1, 2, 3)] == [4, 2, 1]
    assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (11, 7)
    assert stats["mean_accepted_length"] == 1 + 7 / 5


def test_a_row_that_often_has_drafts_may_have_some_again():
    """Reports are some steps old: text that is copied has a report without drafts now and then."""
    slots = decoding_slots(1, 3)
    books, everyone = DraftBooks(slots, 3, True), np.ones(1, dtype=np.bool_)
    right, none = np.full((1, 4), 7), reports(1, 3, 0)
    books.book(plan_of(slots, 1), right, np.ones(1, int), none)
    assert books.width_for(everyone) == 1
    for _ in range(4):
        books.book(plan_of(slots, 1), right, np.ones(1, int), reports(1, 3, 3))
    books.book(plan_of(slots, 1), right, np.ones(1, int), none)
    assert books.width_for(everyone) == 4
    widths = []
    for _ in range(24):
        books.book(plan_of(slots, 1), right, np.ones(1, int), none)
        widths.append(books.width_for(everyone))
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 1
    # Drafts that were wrong do not count.
    slots.generation[:] += 1
    wrong = np.full((1, 4), 5)
    for found in (3, 3, 3, 3, 0):
        books.book(plan_of(slots, 1), wrong, np.ones(1, int), reports(1, 3, found))
    assert books.width_for(everyone) == 1


def gain_of(rows, found, right, hits=0):
    """Expected tokens of `rows` such rows, in units of 1 / `ONE`."""
    row = [np.full(rows, value) for value in (found, right, hits, 3)]
    return int(ExpectedGain(3).of(*row).sum())


def test_expected_tokens():
    half = ONE // 2
    assert gain_of(2, 3, half) == 2 * (ONE // 2 + ONE // 4 + ONE // 8)
    assert gain_of(1, 1, half) == half
    assert gain_of(1, 0, half) == 0
    assert gain_of(1, 0, half, half) == half + half // 2 + half // 4
    assert gain_of(1, 2, 0, half) == 0


def test_wide_steps_of_many_rows_cost_more():
    assert extra_time(1, 2) == extra_time(40, 2) == ONE // 20 + ONE // 60
    assert extra_time(1, 4) == extra_time(20, 4) == ONE // 20 + 3 * (ONE // 60)
    for rows, width, measured in ((64, 2, 0.20), (64, 4, 0.70)):  # docs/records/speculation.md
        assert abs(extra_time(rows, width) / ONE - measured) < 0.08
    assert is_wide_worth_it(8, 4, gain_of(8, 3, ONE))
    assert not is_wide_worth_it(100, 4, gain_of(8, 3, ONE))  # 8 of 100
    assert not is_wide_worth_it(1, 2, gain_of(1, 1, ONE // 20))
