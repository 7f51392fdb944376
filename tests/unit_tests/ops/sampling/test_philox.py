"""Random numbers: the published test vectors, and independence of everything but the key."""

import math

import pytest
import torch

from megatron_async.ops.sampling.philox import gumbel_noise, philox4x32


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


def scalar_philox(counter, key):
    """Philox4x32-10 by the paper, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        one, two = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(two >> 32) ^ c[1] ^ k[0], two % 2**32, (one >> 32) ^ c[3] ^ k[1], one % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_equals_a_scalar_implementation():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(2**32, (6, 200), generator=generator)
    inputs[:, :3] = torch.tensor([0, 2**31, 2**32 - 1])  # signs must not matter
    found = torch.stack(philox4x32(list(inputs[:4]), list(inputs[4:])))
    for i in range(inputs.size(1)):
        column = [int(word) for word in inputs[:, i]]
        assert found[:, i].tolist() == scalar_philox(column[:4], column[4:])


def test_noise_is_made_of_the_documented_words():
    seed, position = 5 << 40 | 7, 1234
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 10)[0]
    for token in range(10):
        words = scalar_philox((token // 4, position, 0, 0), (seed % 2**32, seed >> 32))
        uniform = ((words[token % 4] >> 9) + 0.5) * 2.0**-23
        gumbel = -math.log(-math.log(uniform))
        assert float(noise[token]) == pytest.approx(gumbel, rel=1e-5, abs=1e-5)


def test_noise_depends_on_seed_position_and_token_alone():
    seeds = torch.tensor([1, 2, 1, 2**62 + 3])
    positions = torch.tensor([5, 5, 6, 5], dtype=torch.int32)
    batch = gumbel_noise(seeds, positions, 103)
    for i in range(4):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 103)[0]
        assert torch.equal(batch[i], alone)
    assert torch.equal(gumbel_noise(seeds, positions, 50), batch[:, :50])
    for first in (3, 66, 102):
        assert torch.equal(gumbel_noise(seeds, positions, 103 - first, first), batch[:, first:])
    assert len({tuple(row.tolist()) for row in batch}) == 4


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(8), torch.arange(8), 50_000).double()
    assert torch.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.02)
    # The median of a standard Gumbel is -ln(ln 2).
    assert (noise < 0.36651).double().mean() == pytest.approx(0.5, abs=0.005)
