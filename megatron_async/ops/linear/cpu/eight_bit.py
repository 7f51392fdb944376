"""Products with weights of 8 bits on a CPU.

A CPU's decode step is bound by the bytes of its weights, and a larger batch by its multipliers:
8-bit integers are a quarter of float32's bytes. The weight has a scale for each output. So that a
request's answer does not depend on the other requests, each row of the input has a scale of its own
("per token" in vLLM). Eight bits are too few for rows with one very large element, as in language
models; so rows have 16.

Where Numba compiles, the loops of `integer_products.py` multiply. Weights of a GGUF file are kept
otherwise (`GroupedWeight`).

Elsewhere torch's fbgemm kernels multiply 8-bit integers; a row is two rows of 8 bits then, the
second one what the rounding of the first has left. On a Zen 3 EPYC our loops take a third to six
tenths of fbgemm's time at one row, and half at eight. On a Xeon with VNNI instructions, which
fbgemm has kernels for, a step of SmolLM2-135M takes 25 to 33 ms with ours and 39 to 47 with
fbgemm's at one row, 50 to 56 and 65 to 72 at eight, the modules around them the same
(docs/records/cpu_throughput.md, 2026-11-26).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.cpu.compiler import compiles, multiplies_integers
from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight
from megatron_async.ops.linear.cpu.widened_weight import LARGEST, LEAST_SCALE, WidenedWeight
from megatron_async.ops.linear.weight_format import INT8

ENGINE = "fbgemm"
ZERO = 128
"""fbgemm's rows are unsigned."""
LARGEST_WITHOUT_VNNI = 63
"""Without VNNI instructions fbgemm adds two products in 16 bits, which saturate beyond 32,767:
2 x 255 x 63 does not."""
FINER = 254
"""Factor of the remainder after rounding, at most a half, so that it uses the range of 8 bits."""
ROUNDING = 1.5 * 2**23
"""float32 numbers of this size have no fraction: added and taken away it rounds, to even."""
_LARGEST, _FINER, _LEAST = np.float32(LARGEST), np.float32(FINER), np.float32(LEAST_SCALE)
LoopedWeight = WidenedWeight | GroupedWeight
_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


class EightBitWeight:
    """A float32 weight `[outputs, k]` on a CPU as a `KeptWeight` of 8-bit integers.

    Raises:
        ConfigurationError: torch has no fbgemm here (it is for x86 CPUs with AVX2).
    """

    def __init__(self, weight: Tensor) -> None:
        if not is_available():
            raise ConfigurationError(
                f"quantization='int8' needs torch's {ENGINE} kernels, which are for x86 CPUs; this "
                f"torch has {torch.backends.quantized.supported_engines}: leave it None."
            )
        self.looped: WidenedWeight | None = None
        self.format = INT8
        if multiplies_integers():
            self.looped = WidenedWeight(weight)
            self.nbytes = self.looped.nbytes
            return
        outputs = weight.size(0)
        largest = LARGEST if has_vnni() else LARGEST_WITHOUT_VNNI
        scales = weight.abs().amax(1).div(largest).clamp_min(LEAST_SCALE)
        zeros = torch.zeros(outputs, dtype=torch.int64)
        integers = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = ENGINE
        try:
            self._packed = torch.ops.quantized.linear_prepack(integers, None)
        finally:
            torch.backends.quantized.engine = before
        self.nbytes = weight.numel() + 4 * outputs

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: float32 `[..., k]` -> `[..., outputs]`. A row depends on no other
        one."""
        if self.looped is not None:
            return self.looped.product(x, bias)
        if compiles() and bias is None and x.is_contiguous():
            return self._product(x)
        rows = x.reshape(-1, x.size(-1))
        count = len(rows)
        factor = LARGEST / rows.abs().amax(1, keepdim=True).clamp_min_(LEAST_SCALE)
        # Small operations are as much of a small model's time as products: no copies, and no
        # `round`, which took 54 us where these two sums take 6.
        both = rows.new_empty((2 * count, rows.size(1)))
        scaled, rest = both[:count], both[count:]
        torch.mul(rows, factor, out=scaled)
        torch.add(scaled, ROUNDING, out=rest).sub_(ROUNDING)
        torch.sub(scaled, rest, out=rest).mul_(FINER)
        sums = _product(both, 1.0, ZERO, self._packed)
        out: Tensor = sums[:count].add_(sums[count:], alpha=1 / FINER).div_(factor)
        if bias is not None:
            out.add_(bias)
        return out.view(*x.shape[:-1], out.size(-1))

    def _product(self, x: Tensor) -> Tensor:
        """`product`, with a loop before and after the kernel instead of torch's operations."""
        from megatron_async.ops.cpu import row_kernels

        count = x.numel() // x.size(-1)
        both, factors = np.empty((2 * count, x.size(-1)), np.float32), np.empty(count, np.float32)
        row_kernels.halves(x.view(count, -1).numpy(), both, factors, _LARGEST, _FINER, _LEAST)
        sums: Tensor = _product(torch.from_numpy(both), 1.0, ZERO, self._packed)
        row_kernels.whole(sums.numpy(), factors, _FINER)
        return sums[:count].view(*x.shape[:-1], -1)


def is_available() -> bool:
    """Whether torch has the kernels that 8-bit weights can need."""
    return ENGINE in torch.backends.quantized.supported_engines


def has_vnni() -> bool:
    """Whether this CPU multiplies 8-bit integers into 32-bit sums."""
    return bool(torch.cpu._is_vnni_supported())
