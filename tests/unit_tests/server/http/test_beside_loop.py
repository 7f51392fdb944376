"""What may take long is not done on the event loop, though it was tried there."""

import asyncio
import threading
from typing import Any

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.chat.template_process import TakesLong
from megatron_async.server.fields.request_bodies import ChatRequest, Message
from megatron_async.server.http.beside_loop import read_body
from megatron_async.server.http.generate_routes import GenerateRoutes
from megatron_async.server.stream_hub import StreamHub
from megatron_async.serving.model_card import ModelCard
from tests.support.served_demo import demo_card


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


def test_a_model_is_ready_for_the_first_chat() -> None:
    """The process for its template runs, so that no event loop is told to wait for that."""

    class Client:
        async def card(self) -> ModelCard:
            return demo_card()

        async def ask(self, what: str) -> dict[str, str]:
            return {"state": "running"}

    async def run() -> None:
        client: Any = Client()
        routes = GenerateRoutes(client, ApiConfig(coordinator=""), StreamHub())
        await routes.prepare()
        served = await routes._model_now()
        chat = ChatRequest(messages=[Message(role="user", content="Hello")])
        assert "Hello" in served.chat.render(chat, None)
        served.chat.close()

    asyncio.run(run())
