"""Cases of the lookup in a rank's rows of the vocabulary."""

import torch

from megatron_async.ops.ranks.vocab_embedding import vocab_embedding
from tests.unit_tests.ops.cases import Arguments, Numbers, grid


def lookup_arguments(at: Numbers, hidden: int, first: int, scale: float) -> Arguments:
    """Arguments of `vocab_embedding`, of whose tokens some are another rank's."""
    tokens = torch.tensor([0, 11, 4, 5, 4, 7], device=at.device)
    return tokens, at.rows(4, hidden), first, scale


SIZES = {"hidden": [8, 1500], "first": [0, 4, 8], "scale": [1.0, 4.0]}
CASES = [*grid(vocab_embedding, lookup_arguments, SIZES)]
