"""The error of every checkpoint reader and writer."""

from __future__ import annotations

from megatron_async.errors import ConfigurationError

LONGEST_MESSAGE = 2000
"""Characters."""


class CheckpointError(ConfigurationError):
    """A model that cannot be found, read, understood or written.

    The message names the file or value and says what to do. A value of a file may be of any length,
    so the middle of a long message is left out.
    """

    def __init__(self, message: str) -> None:
        half = LONGEST_MESSAGE // 2
        is_long = len(message) > LONGEST_MESSAGE
        super().__init__(f"{message[:half]} ... {message[-half:]}" if is_long else message)
