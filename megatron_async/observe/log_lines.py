"""The log of a service: one form of line for all of its processes, on stderr."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

COORDINATOR = "coordinator"
"""Name of the thread that a coordinator has in another process: its lines have this name."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
INDENT = "    "


class LineFormatter(logging.Formatter):
    """Writes "DATE TIME LEVEL PROCESS: TEXT". Whatever a text quotes, it is one line: control
    characters are escaped, and lines of a traceback are indented."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(process_name)s: %(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, and behind it the lines of its traceback."""
        is_coordinators = record.threadName == COORDINATOR
        record.process_name = COORDINATOR if is_coordinators else self._process
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line itself."""
        return _CONTROL.sub(_escaped, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The lines of a traceback; what an exception says may have lines of its own."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(INDENT + _CONTROL.sub(_escaped, line) for line in lines)


def log_to_stderr(process: str) -> None:
    """From now on the package's lines, warnings of Python and of libraries go to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.getLogger().addHandler(handler)
    logging.getLogger("megatron_async").setLevel(logging.INFO)
    logging.captureWarnings(True)


def said_line(process: str, text: str) -> str:
    """A text for the user who started a process; its first line has the form of the log's."""
    first, newline, rest = text.partition("\n")
    record = logging.LogRecord("", logging.INFO, "", 0, first, None, None)
    return LineFormatter(process).format(record) + newline + rest


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
