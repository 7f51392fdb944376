"""The sampler's kernels against the plain-torch sampler: same tokens, same sets of kept tokens."""

import pytest
import torch

from megatron_async.ops.sampling import triton_sampling
from megatron_async.ops.sampling.sampling import SamplingMode, filter_logits, sample
from megatron_async.ops.sampling.slot_records import Header
from tests.unit_tests.ops.sampling.cases import mixed_parameters, parameters

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch):
    """Small vocabularies go through every stage."""
    monkeypatch.setattr(triton_sampling, "TILE", 512)
    monkeypatch.setattr(triton_sampling, "SEARCH_TILE", 512)
    monkeypatch.setattr(triton_sampling, "CANDIDATES", 16)


def scaled_logits(logits, params):
    heat = torch.where(params.heats() > 0, params.heats(), 1.0)
    return logits.to(torch.float32) / heat[:, None]


def check_tokens(logits, params, mode=SamplingMode.FILTERED):
    tokens = triton_sampling.sample_gpu(logits, params, mode)[0]
    expected = sample.reference(logits, params, mode)[0]
    assert tokens.dtype == torch.int64
    if params is None:
        assert torch.equal(tokens, expected)
        return
    # Where they differ, the reference's own scores must be a near tie.
    scores = scaled_logits(logits, params)
    if mode == SamplingMode.FILTERED:
        scores = filter_logits(scores, params)
    scores = scores + params.noise(logits.size(1))
    differ = (tokens != expected).nonzero().view(-1)
    ours = scores[differ, tokens[differ]]
    torch.testing.assert_close(ours, scores[differ, expected[differ]], rtol=0, atol=2e-5)
    greedy = params.heats() == 0
    assert torch.equal(tokens[greedy], expected[greedy])
    assert len(differ) <= 0.01 * len(tokens)


def check_kept(logits, params):
    """The set of tokens that top_k and top_p keep, not only one token drawn from it."""
    vocab = logits.size(1)
    row = triton_sampling._row_arguments(logits, params, SamplingMode.FILTERED, vocab)
    scores, _ = triton_sampling.best_of_tiles(row, SamplingMode.FILTERED)
    cut, last, top = triton_sampling.bounds(row, scores)
    token = torch.arange(vocab, device=logits.device)
    values = logits.to(torch.float32)
    kept = (values > cut[:, None]) | ((values == cut[:, None]) & (token <= last[:, None]))
    expected = filter_logits(scaled_logits(logits, params), params) > -torch.inf
    assert torch.equal(top, values.max(dim=1).values)
    # Where they differ, the probability before the token is top_p itself, up to rounding.
    differ = (kept != expected).nonzero()
    assert len(differ) <= 0.001 * kept.numel()
    for at, extra in differ.tolist():
        ranked, order = scaled_logits(logits, params)[at].sort(descending=True, stable=True)
        k, p = (params.numbers(word)[at].item() for word in (Header.TOP_K, Header.TOP_P))
        k = k if k > 0 else vocab
        before = ranked.double()[:k].softmax(0).cumsum(0)[(order == extra).nonzero() - 1]
        assert abs(before - p) < 1e-5


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 2},
        {"top_k": 50},
        {"top_k": 700},
        {"top_k": 2000},
        {"top_p": 0.0503},
        {"top_p": 0.9007},
        {"top_p": 0.9991},
        {"top_k": 50, "top_p": 0.9007},
        {"top_k": 700, "top_p": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_kept_sets_are_exact(filters, spread, device, small_tiles):
    """In bfloat16 a thousand logits have many ties, in float32 none; around 1000, all but ties."""
    params = parameters(2, device, temperature=torch.tensor([0.8, 1.3]), **filters)
    logits = spread * torch.randn(2, 1003, device=device)
    check_kept(logits, params)
    check_kept(logits.to(torch.bfloat16), params)
    check_kept((logits + 1000).to(torch.bfloat16), params)


def test_min_p_cuts_where_it_says(device, small_tiles):
    """One token, 500 that are a little likelier than the limit and 502 that are a little less
    likely. (Which tokens are drawn from random logits tells nothing of a limit a tenth off.)"""
    ratios = torch.tensor([1.0] + [0.1001] * 500 + [0.0999] * 502, device=device)
    logits = (0.8 * ratios.log()).repeat(8, 1)
    params = parameters(8, device, temperature=0.8, min_p=0.1)
    tokens = triton_sampling.sample_gpu(logits, params, SamplingMode.FILTERED)[0]
    assert tokens.max() <= 500
    assert tokens.count_nonzero() > 4
    check_tokens(logits, params)


@pytest.mark.parametrize("top_k", [2, 40, 41, 999])
def test_ties_go_by_token_id(top_k, device, small_tiles):
    """One value everywhere (zero of both signs), and 40 tokens above an all-equal rest."""
    same = torch.zeros(1, 1003, device=device)
    same[:, ::3] = -0.0
    check_kept(same, parameters(1, device, top_k=top_k))
    check_kept(same, parameters(1, device, top_p=top_k / 1000.5))
    peaks = torch.full((1, 1003), -1.5, device=device)
    peaks[0, torch.randperm(1003)[:40].to(device)] = 1.5
    check_kept(peaks, parameters(1, device, top_k=top_k))
    check_kept(peaks, parameters(1, device, top_k=top_k, top_p=0.503))


def test_masked_tokens_are_never_chosen(device, small_tiles):
    """Minus infinity, as a grammar's mask writes it, for whole tiles and for all but one token."""
    logits = torch.randn(4, 1003, device=device)
    logits[:2, 100:900] = -torch.inf
    logits[2:] = -torch.inf
    logits[2:, 777] = -3.0
    for filters in ({}, {"top_k": 50}, {"top_p": 0.9007}, {"min_p": 0.0103}):
        params = parameters(4, device, temperature=0.8, **filters)
        check_tokens(logits, params)
        assert (
            triton_sampling.sample_gpu(logits, params, SamplingMode.FILTERED)[0][2:].eq(777).all()
        )


def test_a_row_does_not_depend_on_its_company(device, small_tiles):
    logits = 3 * torch.randn(8, 1003, device=device)
    params = mixed_parameters(8, device)
    together = triton_sampling.sample_gpu(logits, params, SamplingMode.FILTERED)[0]
    for row in range(0, 8, 3):
        one = logits[row : row + 1]
        alone = triton_sampling.sample_gpu(one, params.one(row), SamplingMode.FILTERED)[0]
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 1003])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_unsound_rows_have_no_token(vocab, dtype, value, device, small_tiles):
    """One NaN or infinity, wherever it is, or nothing but minus infinity; other rows are left
    alone."""
    logits = (3 * torch.randn(8, vocab, device=device)).to(dtype)
    filters = {"top_k": [0, 0, 3, 0] * 2, "top_p": [0.0, 0.0, 0.0, 0.9] * 2}
    params = parameters(8, device, temperature=[0.0, 0.8, 0.8, 0.8] * 2, **filters)
    sound = torch.arange(8, device=device) < 4
    places = [slice(None)] if value < 0 else [0, vocab // 2, vocab - 1, slice(None)]
    for mode in (SamplingMode.GREEDY, SamplingMode.FILTERED):
        expected = triton_sampling.sample_gpu(logits, params, mode)[0].where(sound, -1)
        for place in places:
            damaged = logits.clone()
            damaged[4:, place] = value
            assert torch.equal(triton_sampling.sample_gpu(damaged, params, mode)[0], expected)
            reference = sample.reference(damaged, params, mode)[0]
            assert torch.equal(reference == -1, ~sound)


def test_no_rows():
    assert triton_sampling.sample_gpu(torch.ones(0, 5), None, SamplingMode.GREEDY)[0].shape == (0,)


def test_bad_input():
    logits = torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"strides \(1, 2\)"):
        triton_sampling.sample_gpu(torch.ones(5, 2).t(), None, SamplingMode.GREEDY)
    with pytest.raises(ValueError, match=r"torch.float64 logits.*call .*\.float\(\)"):
        triton_sampling.sample_gpu(logits.double(), None, SamplingMode.GREEDY)
    with pytest.raises(ValueError, match="mode SOFTMAX needs what the rows ask for"):
        triton_sampling.sample_gpu(logits, None, SamplingMode.SOFTMAX)
    with pytest.raises(ValueError, match=r"must be contiguous and \(\(2,\)"):
        triton_sampling.sample_gpu(logits, parameters(3, "cpu"), SamplingMode.SOFTMAX)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(64, 49152), (33, 128256), (7, 151936)])
def test_real_sizes(rows, vocab, dtype):
    for spread in (1.0, 4.0):
        logits = (spread * torch.randn(rows, vocab, device="cuda")).to(dtype)
        check_tokens(logits, None, SamplingMode.GREEDY)
        check_tokens(logits, parameters(rows, "cuda", temperature=0.8), SamplingMode.SOFTMAX)
        check_tokens(logits, mixed_parameters(rows, "cuda"))
        check_tokens(logits, parameters(rows, "cuda", temperature=0.8, top_k=50, top_p=0.9))
        check_kept(logits, parameters(rows, "cuda", temperature=0.8, top_k=50))
