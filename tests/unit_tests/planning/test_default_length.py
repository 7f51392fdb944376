"""How long a sequence may be where nobody says: the model's context, if the pool holds it."""

from typing import Any

import pytest

from megatron_async.checkpoints import open_model
from megatron_async.planning.default_length import default_max_sequence_length

SMOLLM2 = open_model("dummy:smollm2-135m").architecture
BYTES = SMOLLM2.kv_bytes_per_token(4)
LLAMA = open_model("dummy:llama-3.1-8b").architecture


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 8192),  # a GiB is 23,301 tokens
        ({"buffer_size_gb": 0.25}, 5376),  # 22 blocks of 5,825 tokens, one of them the dummy's
        ({"buffer_size_gb": 0.25, "block_size_tokens": 64}, 5760),
        ({"num_kv_blocks": 20}, 5120),
        ({"num_kv_blocks": 4}, 2560),  # as before: short requests are served, long ones refused
        ({"device": "cuda:0"}, 8192),
    ],
)
def test_of_a_small_model(settings: dict[str, Any], longest: int) -> None:
    given = {"device": "cpu", **settings}
    assert default_max_sequence_length(SMOLLM2, 8192, given, 4) == longest
    if "buffer_size_gb" in settings:
        assert longest * BYTES < settings["buffer_size_gb"] * 2**30


def test_of_a_long_context() -> None:
    """131,072 tokens of Llama-3.1-8B take 32 GiB in float32: a GiB holds 4,096, less a block."""
    assert default_max_sequence_length(LLAMA, 131072, {"device": "cpu"}, 4) == 4096 - 256
    assert default_max_sequence_length(LLAMA, 131072, {"device": "cuda"}, 2) == 8192
    wide = {"device": "cpu", "buffer_size_gb": 64.0}
    assert default_max_sequence_length(LLAMA, 131072, wide, 4) == 131072
