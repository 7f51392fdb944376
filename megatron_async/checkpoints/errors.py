"""The error of every checkpoint reader and writer."""

from __future__ import annotations

from megatron_async.errors import ConfigurationError


class CheckpointError(ConfigurationError):
    """A model that cannot be found, read, understood or written.

    The message names the file or value and says what to do.
    """
