"""The tokenizer of benchmarks that need one but no text: the demo model's, or a folder's."""

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.model_names import DEMO
from megatron_async.errors import ConfigurationError
from megatron_async.text.tokenizer import Tokenizer

FOLDER_REMEDY = (
    "--tokenizer FOLDER, a folder with a tokenizer.json (scripts/clients/save_tokenizer.py writes "
    "one where the demo model is installed)"
)


def benchmark_tokenizer(folder: str | None) -> Tokenizer:
    """A tokenizer to serve with, of a folder with a `tokenizer.json`, else the demo model's: a
    ConfigurationError if its package is not installed."""
    if folder is not None:
        return Tokenizer.from_folder(folder)
    try:
        found = open_model(DEMO).tokenizer
    except CheckpointError as error:
        raise ConfigurationError(f"{error}, or give {FOLDER_REMEDY}.") from error
    assert found is not None
    return found
