"""What vLLM's tests of entrypoints import as `tests.utils`: a server that runs already.

Idea: ../../../../docs/server.md, "Clients"; the names are those that the tests use.
"""

from __future__ import annotations

import os
from typing import Any

import openai


class RemoteOpenAIServer:
    """The server at BASE_URL, whatever model and arguments a test asks for."""

    DUMMY_API_KEY = os.environ.get("API_KEY", "none")

    def __init__(self, *_: Any, **__: Any) -> None:
        self.base = os.environ["BASE_URL"].removesuffix("/v1")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def url_for(self, *parts: str) -> str:
        """The address of an endpoint."""
        return "/".join([self.base, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """A client of it."""
        given = {"base_url": f"{self.base}/v1", "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.OpenAI(**{**given, **options})

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """A client of it, for asyncio."""
        given = {"base_url": f"{self.base}/v1", "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.AsyncOpenAI(**{**given, **options})
