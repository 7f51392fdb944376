"""Random rows of GGUF's quantised types, K types too, which the gguf package does not write."""

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind


def blocks_of(kind: Kind, outputs: int, k: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """uint8 `[outputs, bytes of k inputs]`: blocks with random integers and plausible scales."""
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (outputs * k // block, size), np.uint8)
    halves = 1 if kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.Q6_K) else 2
    scales = generator.uniform(-scale, scale, (len(blocks), halves)).astype(np.float16)
    at = size - 2 if kind is Kind.Q6_K else 0
    blocks[:, at : at + 2 * halves] = scales.view(np.uint8)
    return blocks.reshape(outputs, -1)
