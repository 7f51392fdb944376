"""Engines around a real tiny model; after each test everything must be back."""

from dataclasses import replace

import pytest
import torch

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model, init_dummy_weights
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS, engine_around


@pytest.fixture(scope="session")
def model():
    # Untied: with random tied embeddings a model only ever repeats its last token.
    architecture = replace(DUMMY_SHAPES["tiny"], tie_word_embeddings=False)
    model = build_model(architecture, torch.float32, torch.device("cpu"))
    init_dummy_weights(model)
    return model


@pytest.fixture
def make_engine(model):
    """`make_engine(device=None, **InferenceConfig fields)`."""
    engines = []

    def make(**settings):
        engines.append(engine_around(model, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        context = engine.context
        assert context.blocks.allocatable == context.blocks.total
        assert context.slots.num_free == context.max_requests


@pytest.fixture(scope="session")
def expected(model):
    """Tokens of each of PROMPTS, alone and serial."""
    engine = engine_around(model, lookahead=0)
    tokens = [engine.generate([prompt], GREEDY)[0].generated_tokens for prompt in PROMPTS]
    engine.close()
    return tokens
