"""Sampling, by torch and by a CPU's loops, against a naive reference in float64, row by row."""

import math

import pytest
import torch

from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.sampling import sampling
from megatron_async.ops.sampling.sampling import SamplingMode, filter_logits
from tests.unit_tests.ops.sampling.cases import rows_asking


@pytest.fixture(params=["torch", "loops"])
def is_compiled(request):
    if request.param == "loops" and not compiles():
        pytest.skip("Numba is not here, or switched off")
    return request.param == "loops"


@pytest.fixture
def sample(is_compiled):
    run = sampling.sample.on("cpu" if is_compiled else "torch")
    return lambda *arguments: run(*arguments)[0]


def filtered_by_loops(logits, rows):
    """`filter_logits` by the loop that a CPU runs."""
    from megatron_async.ops.sampling.cpu.ranking_kernels import drop

    records, filtered = rows.records.numpy(), logits.clone()
    for row, slot in enumerate(rows.slots.tolist()):
        numbers = records[slot].view("f4")
        drop(filtered[row].numpy(), logits[row].max().numpy()[()], records[slot], numbers)
    return filtered


def tensors(rows, positions=None):
    """`rows` of (temperature, top_k, top_p, min_p, seed)."""
    temperature, top_k, top_p, min_p, seeds = zip(*rows, strict=True)
    return rows_asking(
        len(rows), seeds=seeds, positions=positions or range(len(rows)),
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
    )  # fmt: skip


def naive_kept(logits, top_k, top_p, min_p):
    """Token ids that the filters leave, by walking down the ranking."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, before, kept = sum(weights), 0.0, set()
    for rank, (token, weight) in enumerate(zip(order, weights, strict=True)):
        if rank and ((top_p and before / total >= top_p) or weight < min_p * weights[0]):
            break
        kept.add(token)
        before += weight
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 3, 20, 1000])
@pytest.mark.parametrize("top_p", [0.0, 0.31, 0.89])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_keep_what_a_walk_down_the_ranking_keeps(is_compiled, top_k, top_p, min_p):
    logits = torch.randn(6, 83, generator=torch.Generator().manual_seed(top_k))
    logits[1] = logits[1].round()  # ties
    logits[2] = 0.0
    keep = filtered_by_loops if is_compiled else filter_logits
    filtered = keep(logits, tensors([(1.0, top_k, top_p, min_p, 0)] * 6))
    for row in range(6):
        kept = set(torch.isfinite(filtered[row]).nonzero().flatten().tolist())
        assert kept == naive_kept(logits[row].double().tolist(), top_k, top_p, min_p)
        assert all(filtered[row, token] == logits[row, token] for token in kept)


def test_a_row_does_not_depend_on_its_company_or_mode(sample):
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0))
    rows = [(0.0, 0, 0.0, 0.0, 1), (1.0, 0, 0.0, 0.0, 2), (0.7, 5, 0.9, 0.1, 3),
            (2.0, 1, 0.0, 0.0, 4), (1.3, 0, 0.5, 0.0, 5)]  # fmt: skip
    together = sample(logits, tensors(rows), SamplingMode.FILTERED)
    for i, row in enumerate(rows):
        one = logits[i : i + 1]
        for mode in SamplingMode:
            needed = (SamplingMode.GREEDY, SamplingMode.SOFTMAX, SamplingMode.FILTERED,
                      SamplingMode.GREEDY, SamplingMode.FILTERED)[i]  # fmt: skip
            if mode >= needed:
                alone = sample(one, tensors([row], [i]), mode)
                assert alone[0] == together[i], (i, mode)
    assert together[0] == logits[0].argmax()
    assert together[3] == logits[3].argmax()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 0.0, 0.0),
        (0.8, 4, 0.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.5, 0, 0.0, 0.3),
        (1.2, 5, 0.9, 0.1),
    ],
)
def test_samples_follow_the_filtered_distribution(sample, temperature, top_k, top_p, min_p):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, 1.2])
    count = 20_000
    params = tensors([(temperature, top_k, top_p, min_p, 11)] * count, list(range(count)))
    samples = sample(logits.expand(count, -1), params, SamplingMode.FILTERED)
    found = torch.bincount(samples, minlength=6).double()
    scaled = (logits / temperature).double()
    kept = sorted(naive_kept(scaled.tolist(), top_k, top_p, min_p))
    assert found.sum() == found[kept].sum() == count
    expected = torch.softmax(scaled[kept], 0) * count
    chi_square = ((found[kept] - expected) ** 2 / expected).sum()
    # 99.9 % of chi-square, by degrees of freedom.
    limits = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5}
    assert chi_square < limits[len(kept) - 1]


@pytest.mark.parametrize("mode", SamplingMode)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_unsound_row_has_no_token(sample, mode, value):
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0))
    rows = tensors([(0.0, 0, 0.0, 0.0, 1), (1.0, 0, 0.0, 0.0, 2), (0.7, 5, 0.9, 0.1, 3),
                    (1.0, 0, 0.0, 0.0, 4)])  # fmt: skip
    expected = sample(logits, rows, mode)
    for damaged in range(4):
        broken = logits.clone()
        broken[damaged, 50] = value
        found = sample(broken, rows, mode)
        assert found[damaged] == -1
        assert [t for i, t in enumerate(found.tolist()) if i != damaged] == [
            t for i, t in enumerate(expected.tolist()) if i != damaged
        ]
    assert sample(torch.full_like(logits, -math.inf), rows, mode).eq(-1).all()
