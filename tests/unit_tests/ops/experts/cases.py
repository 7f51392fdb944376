"""Cases of the shared expert's gate, and of the routing record."""

import torch

from megatron_async.ops.experts.routing_record import keep_routing
from megatron_async.ops.experts.shared_gate import add_shared_expert
from tests.unit_tests.ops.cases import Arguments, Numbers, grid


def gate_arguments(at: Numbers, tokens: int, hidden: int) -> Arguments:
    """Arguments of `add_shared_expert`."""
    rows = [at.rows(tokens, hidden) for _ in range(3)]
    return *rows, at.rows(1, hidden, scale=hidden**-0.5)


def record_arguments(at: Numbers, layers: int, tokens: int, topk: int, wide: bool) -> Arguments:
    """Arguments of `keep_routing`, with two tokens that only pad the group's."""
    most, dtype = (60_000, torch.int16) if wide else (256, torch.uint8)
    experts = torch.randint(most, (layers, tokens + 2, topk), dtype=torch.int32, device=at.device)
    places = torch.randperm(tokens + 9, device=at.device)[:tokens]
    record = torch.zeros(tokens + 9, layers, topk, dtype=dtype, device=at.device)
    return experts, places, record


SIZES = {"tokens hidden": [(3, 2048), (5, 72), (1, 16), (0, 8)]}
RECORDS = {"layers tokens topk wide": [(1, 1, 1, False), (3, 5, 2, False), (48, 20, 8, True)]}
CASES = [
    *grid(add_shared_expert, gate_arguments, SIZES),
    *grid(keep_routing, record_arguments, RECORDS),
]
