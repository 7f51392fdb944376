"""What vLLM's tests of entrypoints import as `vllm.tokenizers`."""

from __future__ import annotations

import os
from typing import Any


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer of the served model, from the folder TOKENIZER."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])
