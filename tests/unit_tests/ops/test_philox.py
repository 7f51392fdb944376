"""Random numbers: the published test vectors, and independence of everything but the key."""

import pytest
import torch

from megatron_async.ops.philox import gumbel_noise, philox4x32


def words(text):
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    found = philox4x32(words(counter), words(key))
    assert [int(word) for word in found] == [int(word, 16) for word in expected.split()]


def test_noise_depends_on_seed_position_and_token_alone():
    seeds = torch.tensor([1, 2, 1, 2**62 + 3])
    positions = torch.tensor([5, 5, 6, 5], dtype=torch.int32)
    batch = gumbel_noise(seeds, positions, 103)
    for i in range(4):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 103)[0]
        assert torch.equal(batch[i], alone)
    assert torch.equal(gumbel_noise(seeds, positions, 50), batch[:, :50])
    assert len({tuple(row.tolist()) for row in batch}) == 4


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(8), torch.arange(8), 50_000).double()
    assert torch.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.02)
    # The median of a standard Gumbel is -ln(ln 2).
    assert (noise < 0.36651).double().mean() == pytest.approx(0.5, abs=0.005)
