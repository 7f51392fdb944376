"""`general.sampling.*` in a GGUF file: what the model's makers say of its sampling.

The converter of llama.cpp writes a model's `generation_config.json` so (`Keys.General` of the gguf
package from 0.18; llama.cpp's `common/common.cpp` reads them).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron_async.checkpoints.gguf_metadata import as_written

PREFIX = "general.sampling."
NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Name in the file: name in generation_config.json."""
OFF = {"mirostat": 0, "xtc_probability": 0.0}
"""Ways of sampling that are not served, and the value that is off."""

logger = logging.getLogger("megatron_async")


def generation_config(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of a `generation_config.json` from a file's metadata.

    Args:
        metadata: key -> value, those that begin with `PREFIX`.
        source: the file's name, for a warning about what is not served.
    """
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        name = key.removeprefix(PREFIX)
        if name in OFF and value != OFF[name]:
            logger.warning("%s: %s = %s is not served: answers go without it.", source, key, value)
        if name in NAMES:
            found[NAMES[name]] = as_written(value) if isinstance(value, float) else value
    return found
