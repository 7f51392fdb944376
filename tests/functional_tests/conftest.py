"""Engines whose end is checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import assert_all_is_back

from megatron_async import DynamicInferenceEngine


@pytest.fixture
def watched_engines() -> Iterator[list[DynamicInferenceEngine]]:
    """Engines put into this list are closed after the test, and everything must be back then."""
    engines: list[DynamicInferenceEngine] = []
    yield engines
    for engine in engines:
        engine.close()
    for engine in engines:
        assert_all_is_back(engine)
