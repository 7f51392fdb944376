"""Write a model's tokenizer as a Hugging Face folder, for clients that count tokens.

python scripts/clients/save_tokenizer.py smollm2 FOLDER
"""

import sys
from pathlib import Path

from megatron_async.checkpoints.registry import open_model


def main() -> None:
    """Save it."""
    model, name = sys.argv[1:]
    tokenizer = open_model(model).tokenizer
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer: serve a model that has one.")
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)


if __name__ == "__main__":
    main()
