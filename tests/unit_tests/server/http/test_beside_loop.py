"""What may take long is not done on the event loop, though it was tried there."""

import asyncio
import threading

from megatron_async.server.chat.template_process import TakesLong
from megatron_async.server.http.beside_loop import read_body


def test_what_takes_long_goes_on_beside_the_loop():
    threads = []

    def read():
        threads.append(threading.current_thread())
        if threading.current_thread() is threading.main_thread():
            raise TakesLong
        return "read"

    assert asyncio.run(read_body(b"{}", read)) == "read"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    threads.clear()
    assert asyncio.run(read_body(b"x" * 100_000, read)) == "read"
    assert len(threads) == 1
