"""For all tests: the demo model, loaded once a worker, and no reaching for the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megatron_async import LLM

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def smollm2_llm() -> Iterator[LLM]:
    """The demo model as a user gets it: float32 on the CPU, lookahead 1."""
    from megatron_async import LLM

    with LLM("smollm2", device="cpu", lookahead=1, check_integrity=True) as llm:
        yield llm
