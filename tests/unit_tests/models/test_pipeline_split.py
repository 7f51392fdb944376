"""Layers of pipeline stages: how they are split, and their names in and outside of a stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.models.pipeline import split_pattern, stage_of


@pytest.mark.parametrize(
    ("pattern", "stages", "expected"),
    [
        ("*-*-", 1, "*-*-"),
        ("*-*-*-", 2, "*-*-|*-"),
        ("*-" * 30, 4, "|".join(["*-" * 8, "*-" * 8, "*-" * 7, "*-" * 7])),
        ("*E*E*-", 3, "*E|*E|*-"),
        ("MM-*-M", 2, "MM-|*-M"),
    ],
)
def test_split(pattern, stages, expected):
    assert split_pattern(pattern, stages) == expected


def test_more_stages_than_layers():
    with pytest.raises(ConfigurationError, match=r"size=3, but this model has 2 layers.*at most 2"):
        split_pattern("*-*-", 3)


def test_names():
    config = SimpleNamespace(hybrid_layer_pattern="*-*-|*-|*-", pipeline_stage=1)
    stage = stage_of(config)
    assert (stage.first_layer, stage.is_first, stage.is_last) == (4, False, False)
    local = "decoder.layers.1.mlp.linear_fc1.weight"
    assert stage.local_name("decoder.layers.5.mlp.linear_fc1.weight") == local
    assert stage.global_name(local) == "decoder.layers.5.mlp.linear_fc1.weight"
    elsewhere = [3, 6]
    assert [stage.local_name(f"decoder.layers.{layer}.x") for layer in elsewhere] == [None, None]
    ends = ["embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"]
    held = []
    for index in range(3):
        config.pipeline_stage = index
        held.append([stage_of(config).local_name(name) for name in ends])
    assert held == [[ends[0], None, None], [None] * 3, [None, *ends[1:]]]


def test_a_model_without_stages_holds_everything():
    stage = stage_of(SimpleNamespace())
    names = ["embedding.x", "decoder.layers.7.x", "output_layer.weight"]
    assert [stage.local_name(name) for name in names] == names
