"""Windows, sinks and softcaps of the kernels, beside a softmax in float64."""

import pytest
import torch

from megatron_async.ops.attention import prefill_schedule
from tests.unit_tests.ops.attention.decode_batch import Batch
from tests.unit_tests.ops.attention.prefill_batch import PrefillBatch

PART = 128
LENGTHS = [1, 63, 64, 65, 128, 129, 0, 330]
"""At, below and above the borders of blocks and of windows."""


@pytest.mark.pairs
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "block_size", "dim"),
    [
        (64, 0.0, True, 64, 64),
        (65, 0.0, False, 16, 32),
        (127, 2.0, False, 48, 80),
        (1, 0.0, True, 64, 32),
        (0, 2.0, True, 64, 32),
    ],
)
@pytest.mark.parametrize(("count", "part"), [(6, 0), (132, 0), (60, PART)])
def test_decode(window, softcap, has_sinks, block_size, dim, count, width, part, device):
    """Break it: a sink in each part of a row, a window from the last query token, or a key more."""
    batch = Batch(
        max(LENGTHS), len(LENGTHS), block_size, 2, 3, dim, torch.float32, device, count,
        width=width, part=part, window=window, softcap=softcap, has_sinks=has_sinks,
    )  # fmt: skip
    expected = batch.refill(LENGTHS, query_scale=3.0)
    batch.run(is_settled=count == 6)
    batch.check(expected)
    assert not batch.workspace.arrived.any()


@pytest.mark.parametrize(("count", "part"), [(6, 0), (132, 0), (60, PART)])
def test_a_narrow_cache(count, part, device):
    """Sums of values of a narrow cache are larger by a power of two, sinks are not."""
    rules = {"is_narrow": True, "window": 65, "has_sinks": True}
    batch = Batch(330, len(LENGTHS), 64, 2, 3, 64, torch.float16, device, count, width=2, part=part,
                  **rules)  # fmt: skip
    expected = batch.refill(LENGTHS)
    batch.run()
    batch.check(expected)
    if not part:
        chunks = PrefillBatch(66, 2, 330, 64, 2, 2, 64, torch.float16, device, **rules)
        chunks.refill([(1, 129), (65, 330)])
        chunks.attend(chunks.rows([(1, 129), (65, 330)]))
        chunks.check()


CHUNKS = [(129, 129), (1, 200), (64, 128), (70, 333), (3, 65), (17, 64)]


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "block_size", "dim", "dtype"),
    [
        (64, 0.0, True, 64, 64, torch.float16),
        (65, 0.0, False, 16, 80, torch.float32),
        (127, 2.0, False, 48, 32, torch.float16),
        (1, 0.0, True, 128, 128, torch.float16),
        (0, 2.0, True, 64, 32, torch.float16),
        (300, 0.0, False, 64, 64, torch.float16),
    ],
)
def test_prefill(window, softcap, has_sinks, block_size, dim, dtype, device, monkeypatch):
    """Keys are divided where there is no window. Break it: tiles from the last query's window on,
    a window of a key more, a sink in each part."""
    batch = PrefillBatch(
        sum(query for query, _ in CHUNKS), len(CHUNKS), 333, block_size, 2, 2, dim, dtype, device,
        window=window, softcap=softcap, has_sinks=has_sinks,
    )  # fmt: skip
    batch.refill(CHUNKS, query_scale=3.0)
    monkeypatch.setattr(prefill_schedule, "LEAST_KEYS", 64)
    schedule = batch.schedule(0 if window else 60)
    batch.attend(batch.rows(CHUNKS), schedule)
    batch.check()
    assert (schedule.units[:, 8].max() > 1) == (window == 0)
