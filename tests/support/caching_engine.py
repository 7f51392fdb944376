"""An engine with a prefix cache of small blocks, and a text whose blocks are all different."""

from typing import Any

import torch

from megatron_async import DynamicInferenceEngine
from tests.support.attention_model import VOCABULARY
from tests.support.harness import make_engine

TEXT = [(7 * n * n + 3) % VOCABULARY for n in range(64)]


def caching(model: torch.nn.Module, **config: Any) -> DynamicInferenceEngine:
    return make_engine(
        model, enable_prefix_caching=True, **{"block_size_tokens": 4, "max_requests": 8, **config}
    )
