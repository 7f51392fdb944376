"""The model on one rank whose kernels are those of a rank's part."""

from dataclasses import replace

import pytest

from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import EXPERTS
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.partition import part_of_rank

SHAPES = ("llama-3.1-8b", "qwen3-30b-a3b", "nemotron-3-nano-30b", "granite-4.0-h-350m")


def shapes(architecture, shard):
    return {weight.name: weight.shape for weight in weights(architecture, shard)}


@pytest.mark.parametrize("name", [*SHAPES, "qwen3-next-80b"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_its_weights_have_the_shapes_of_a_ranks_part(name, ranks):
    whole = replace(DUMMY_SHAPES[name], add_qkv_bias=EXPERTS not in DUMMY_SHAPES[name].pattern)
    part = part_of_rank(whole, ParallelSizes(tensor_model_parallel=ranks))
    assert shapes(part, Shard()) == shapes(whole, Shard(tensor_size=ranks))


def test_a_vocabulary_is_padded_first():
    tiny = replace(DUMMY_SHAPES["tiny"], vocab_size=511)
    assert part_of_rank(tiny, ParallelSizes(tensor_model_parallel=2)).vocab_size == 256


def test_sizes_that_no_ranks_divide_are_refused_as_by_the_model():
    with pytest.raises(ConfigurationError, match="does not divide the model's 2 key/value heads"):
        part_of_rank(DUMMY_SHAPES["tiny"], ParallelSizes(tensor_model_parallel=4))
