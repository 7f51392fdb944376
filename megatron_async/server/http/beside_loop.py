"""What reads a body: on the event loop where that is quick, else beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_async.server.chat.template_renderer import TakesLong
from megatron_async.server.fields.ask import is_quick


async def read_body[T](body: bytes, read: Callable[[], T]) -> T:
    """What `read` returns or raises; a thread costs a quick body more than it takes. `read` may be
    called a second time, if it raises `TakesLong` at the first."""
    if is_quick(body):
        try:
            return read()
        except TakesLong:  # the model's chat template, for this chat
            pass
    return await asyncio.to_thread(read)
