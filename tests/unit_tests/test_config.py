"""`InferenceConfig`: defaults, Megatron's names, and an error for what cannot work."""

import math
from enum import Enum

import pytest

from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError


class SchedMode(Enum):
    """Like Megatron's own enum of this setting."""

    ASYNC = "async"


@pytest.mark.parametrize(
    ("mode", "lookahead", "expected"),
    [
        ("legacy", None, 0),
        ("async", None, 1),
        (SchedMode.ASYNC, None, 1),
        (None, None, 1),
        (None, 5, 5),
        ("legacy", 0, 0),
    ],
)
def test_async_sched_mode_is_lookahead(mode, lookahead, expected):
    config = InferenceConfig(async_sched_mode=mode, lookahead=lookahead)
    assert config.lookahead == expected
    assert config.steps_in_flight == expected + 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lookahead": -1}, ("lookahead=-1", "at least 0")),
        ({"lookahead": 1.5}, ("lookahead=1.5", "integer")),
        ({"lookahead": True}, ("lookahead=True",)),
        ({"async_sched_mode": "fast"}, ("'fast'", "'legacy'", "'async'")),
        ({"async_sched_mode": "legacy", "lookahead": 1}, ("lookahead 0", "lookahead=1")),
        ({"block_size_tokens": 0}, ("block_size_tokens=0", "at least 1")),
        ({"block_size_tokens": "16"}, ("block_size_tokens='16'", "integer")),
        ({"max_requests": 0}, ("max_requests=0", "at least 1")),
        ({"max_tokens": None}, ("max_tokens=None", "integer")),
        ({"max_sequence_length": -5}, ("max_sequence_length=-5", "at least 1")),
        ({"num_kv_blocks": True}, ("num_kv_blocks=True",)),
        ({"num_kv_blocks": 0}, ("num_kv_blocks=0", "at least 1")),
        ({"num_cuda_graphs": -1}, ("num_cuda_graphs=-1", "at least 0")),
        ({"buffer_size_gb": -2}, ("buffer_size_gb=-2", "above 0")),
        ({"buffer_size_gb": math.nan}, ("buffer_size_gb=nan", "above 0")),
        ({"buffer_size_gb": math.inf}, ("buffer_size_gb=inf", "above 0")),
        ({"buffer_size_gb": "2"}, ("buffer_size_gb='2'", "number of GiB")),
        ({"paused_buffer_size_gb": 0}, ("paused_buffer_size_gb=0", "above 0")),
        ({"paused_buffer_size_gb": math.inf}, ("paused_buffer_size_gb=inf", "above 0")),
        ({"prefix_caching_mamba_gb": "2"}, ("prefix_caching_mamba_gb='2'", "number of GiB")),
        ({"prefix_caching_mamba_gb": -math.inf}, ("prefix_caching_mamba_gb=-inf", "number of GiB")),
        ({"inference_sampling_seed": "x"}, ("inference_sampling_seed='x'", "integer")),
        ({"inference_sampling_seed": -1}, ("inference_sampling_seed=-1", "at least 0")),
        ({"max_tokens": 4, "max_requests": 8}, ("max_tokens=4", "max_requests=8", "Raise")),
        ({"draft_vocab_size": 9}, ("draft_vocab_size=9", "'mtp', not None")),
        (
            {"draft_vocab_size": 0, "speculative_method": "mtp"},
            ("draft_vocab_size=0", "at least 1"),
        ),
        (
            {"materialize_only_last_token_logits": False},
            ("materialize_only_last_token_logits=False", "leave it True"),
        ),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigurationError) as error:
        InferenceConfig(**settings)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("settings", "slots"),
    [({}, 256), ({"max_tokens": 64}, 64), ({"max_tokens": 300}, 256), ({"max_requests": 8}, 8)],
)
def test_a_small_token_budget_lowers_the_default_of_max_requests(settings, slots):
    assert InferenceConfig(**settings).max_requests == slots
