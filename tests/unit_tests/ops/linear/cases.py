"""Cases of norms and activations."""

from megatron_async.ops.linear.activations import squared_relu, swiglu
from megatron_async.ops.linear.rms_norm import MAX_HIDDEN, add_rms_norm
from tests.unit_tests.ops.cases import Arguments, Axes, Numbers, grid


def norm_arguments(
    at: Numbers, tokens: int, hidden: int, has_residual: bool = True, pad: int = 0
) -> Arguments:
    """Arguments of `add_rms_norm`."""
    x, residual = at.rows(tokens, hidden, pad=pad), at.rows(tokens, hidden, pad=2 * pad, scale=3.0)
    return x, residual if has_residual else None, at.rows(hidden), 1e-5


def activation_arguments(at: Numbers, tokens: int, width: int, pad: int = 0) -> Arguments:
    """Arguments of `swiglu` and `squared_relu`."""
    return (at.rows(tokens, width, pad=pad, scale=4.0),)


NORMS: Axes = {
    "tokens hidden": [(1, 64), (5, 576), (3, 1), (2, 1000), (7, 100)],
    "has_residual pad": [(True, 0), (False, 0), (True, 7)],
}
LARGE_NORMS: Axes = {
    "tokens": [1, 67, 2048], "hidden": [576, 4096, 5120, MAX_HIDDEN], "has_residual": [True, False],
}  # fmt: skip
WIDTHS = [(1, 128), (3, 2), (5, 3072), (2, 2050), (0, 16), (5, 66)]
LARGE_WIDTHS: Axes = {"tokens width": [(1, 28672), (67, 3072), (2048, 28672)]}
CASES = [
    *grid(add_rms_norm, norm_arguments, NORMS),
    *grid(add_rms_norm, norm_arguments, LARGE_NORMS, is_large=True),
]
for activation in (swiglu, squared_relu):
    CASES += grid(activation, activation_arguments, {"tokens width": WIDTHS, "pad": [0, 5]})
    CASES += grid(activation, activation_arguments, LARGE_WIDTHS, is_large=True)
