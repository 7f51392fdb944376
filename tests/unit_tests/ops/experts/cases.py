"""Cases of the shared expert's gate."""

from megatron_async.ops.experts.shared_gate import add_shared_expert
from tests.unit_tests.ops.cases import Arguments, Numbers, grid


def gate_arguments(at: Numbers, tokens: int, hidden: int) -> Arguments:
    """Arguments of `add_shared_expert`."""
    rows = [at.rows(tokens, hidden) for _ in range(3)]
    return *rows, at.rows(1, hidden, scale=hidden**-0.5)


SIZES = {"tokens hidden": [(3, 2048), (5, 72), (1, 16), (0, 8)]}
CASES = [*grid(add_shared_expert, gate_arguments, SIZES)]
