"""Routing: load, shared prefixes, and a simulated service."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from megatron_async.planning.prefix_hashes import block_hashes
from megatron_async.serving.routing import (
    MOST_PREFIX_BLOCKS,
    POLICIES,
    Candidate,
    PrefixTable,
    RoutingPolicy,
    prompt_hashes,
)

POLICY = RoutingPolicy(slack_tokens=100, slack_ratio=0.25)


def candidate(name: str, tokens: int = 0, free: int = 99, requests: int = 0) -> Candidate:
    return Candidate(name, tokens, free, requests, PrefixTable(1000))


def test_hashes_cover_all_blocks_before() -> None:
    first, second = prompt_hashes([1, 2, 3, 4, 5], 2)
    assert prompt_hashes([1, 2, 3], 2) == [first]
    assert prompt_hashes([9, 2, 3, 4], 2)[1] != second
    assert prompt_hashes([1], 2) == []
    assert len(prompt_hashes([7] * 10_000, 2)) == MOST_PREFIX_BLOCKS
    assert len(prompt_hashes("x" * 100_000, 2)) == MOST_PREFIX_BLOCKS
    assert len(prompt_hashes("x" * 16, 2)) == 2
    assert prompt_hashes("abcdefgh", 2) != prompt_hashes("abcdefgx", 2)


def test_blocks_are_those_of_the_engines_cache() -> None:
    tokens = list(range(100))
    assert prompt_hashes(tokens, 16) == block_hashes(np.array(tokens), 16)
    assert prompt_hashes([1, 2**31, 3, 4], 2) == [], "no token of any model"
    text = "abcd" * 8
    assert len(prompt_hashes(text, 2)) == 4
    assert not set(prompt_hashes(text, 2)) & set(prompt_hashes(list(text.encode()), 8))


def test_the_coordinator_does_without_torch() -> None:
    code = "import sys, megatron_async.serving.coordinator; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_policies_that_do_not_look_at_prompts() -> None:
    prompt = prompt_hashes(list(range(64)), 8)
    a, b, c = candidate("a", tokens=50), candidate("b", tokens=60), candidate("c", tokens=70)
    c.prefix.add(prompt)
    assert POLICIES["prefix"]().choose([a, b, c], prompt, 8) == (c, 8)
    assert POLICIES["least-loaded"]().choose([a, b, c], prompt, 8) == (a, 0)
    full = candidate("full", tokens=1, free=7)
    assert POLICIES["least-loaded"]().choose([full, b, c], prompt, 8) == (b, 0)
    robin = POLICIES["round-robin"]()
    names = [robin.choose([a, b, c], prompt, 8)[0].name for _ in range(5)]
    names += [robin.choose([a, b], prompt, 8)[0].name, robin.choose([c, a, b], prompt, 8)[0].name]
    assert names == ["a", "b", "c", "a", "b", "a", "c"]
    assert robin.choose([c], prompt, 8) == (c, 8)


def test_least_loaded_and_then_who_has_room() -> None:
    a, b = candidate("a", tokens=500), candidate("b", tokens=400)
    assert POLICY.choose([a, b], [], 1) == (b, 0)
    full = candidate("b", tokens=400, free=3)
    assert POLICY.choose([a, full], [], 4) == (a, 0)
    busy = candidate("c", tokens=500, requests=3)
    assert POLICY.choose([busy, a], [], 1)[0] is a


def test_a_shared_prefix_attracts_unless_the_load_is_far_above() -> None:
    prompt = prompt_hashes(list(range(64)), 8)
    idle, near = candidate("idle"), candidate("near", tokens=100)
    near.prefix.add(prompt)
    assert POLICY.choose([idle, near], prompt, 8) == (near, 8)
    far = Candidate("far", 101, 99, 1, near.prefix)
    assert POLICY.choose([idle, far], prompt, 8) == (idle, 0)
    loaded, far = candidate("loaded", tokens=2000), Candidate("far", 2500, 99, 1, near.prefix)
    assert POLICY.choose([loaded, far], prompt, 8) == (far, 8)
    # The longest prefix wins over the lighter load.
    part = candidate("part", tokens=5)
    part.prefix.add(prompt[:3])
    assert POLICY.choose([part, near], prompt, 8) == (near, 8)
    assert POLICY.choose([part, idle], prompt, 8) == (part, 3)


def test_the_table_is_bounded_and_keeps_beginnings() -> None:
    table = PrefixTable(10)
    first, second = prompt_hashes(list(range(0, 60)), 8), prompt_hashes(list(range(100, 160)), 8)
    table.add(first)
    table.add(second)
    assert len(table) == 10
    assert table.match(second) == 7
    assert table.match(first) == 3
    assert table.match(prompt_hashes([5] * 60, 8)) == 0


def test_matches_are_those_of_a_walk_however_little_is_kept() -> None:
    random = np.random.default_rng(3)
    table, latest = PrefixTable(40), []
    for _ in range(300):
        tokens = [int(random.integers(2)) for _ in range(24)]
        prompt = prompt_hashes(tokens[: int(random.integers(25))], 2)
        walked = 0
        while walked < len(prompt) and prompt[walked] in latest:
            walked += 1
        assert table.match(prompt) == walked
        table.add(prompt)
        latest = [each for each in latest if each not in prompt] + prompt[::-1]
        latest = latest[-40:]


def test_simulated_conversations_stay_together_and_load_is_even() -> None:
    """Conversations that grow, on four replicas that work at equal speed."""
    random = np.random.default_rng(1)
    tables = [PrefixTable(4000) for _ in range(4)]
    load = np.zeros(4)
    prompts = [list(random.integers(1000, size=40)) for _ in range(40)]
    policy = RoutingPolicy(slack_tokens=2000)
    matched = total = 0
    highest = 0.0
    for turn in range(1200):
        who = turn if turn < 40 else int(random.integers(40))
        prompts[who] = (prompts[who] + list(random.integers(1000, size=16)))[:400]
        hashes = prompt_hashes([int(token) for token in prompts[who]], 16)
        now = [Candidate(str(i), int(load[i]), 999, 0, tables[i]) for i in range(4)]
        chosen, match = policy.choose(now, hashes, 30)
        tables[int(chosen.name)].add(hashes)
        load[int(chosen.name)] += 16 * (len(hashes) - match) + 64
        load = np.maximum(load - 30, 0)
        matched, total = matched + match, total + len(hashes)
        highest = max(highest, float(load.max() - load.min()))
    assert matched / total > 0.8
    assert highest < 2000 + 500
