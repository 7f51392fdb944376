"""A pytest plugin that runs vLLM's tests of its entrypoints against a server that runs already.

    BASE_URL=... API_KEY=... TOKENIZER=folder PYTHONPATH=scripts/clients/upstream \\
        pytest -p vllm_tests --noconftest vllm-0.33.0/tests/entrypoints/openai/completion

The tests start a server by `tests.utils.RemoteOpenAIServer`; here that name belongs to a class that
starts nothing. What they import of vLLM itself is a placeholder: a test that calls it looks into
vLLM's code and not at a server, and is skipped. `NOT_SERVED` says which others do not apply, and
why.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import requests

INSIDE = "it looks into vLLM's own code"
END = "the end of a choice is an event of its own, as OpenAI's"
ITS_MODEL = "it wants what its own model answers"
ENDLESS = "without a limit of tokens, and the demo model talks on"
NOT_SERVED = {
    "lora": "adapters are not served",
    "prompt_embeds": "embeddings as prompts are not served",
    "logprob_token_ids": "vLLM's field, which the server does not have",
    "truncation_side": "prompts are never cut: one that is too long gets 400",
    "tokenizer_info": "vLLM's endpoint, behind a flag of its own",
    "invocations": "SageMaker's endpoint",
    "server_load": "vLLM's endpoint, behind a flag of its own",
    "show_version": "it wants vLLM's version",
    "watermarked": "watermarks are not served",
    "responses_api": "the Responses protocol is not served",
    "request_cancellation": "it asks for 10,000 tokens, and the demo model has room for 2,560",
    "multiple_non_integer_keys": "it wants all wrong keys in one message",
    "test_completion_streaming": "the demo model ends that answer at once",
    "test_parallel_streaming": END,
    "test_batch_completions": "beam search is not served",
    "test_echo_logprob": "token 0 is text in its model, and a special token in ours",
    "test_chat_streaming": END,
    "test_chat_completion_stream_options": END,
    "more_than_one_prompt_logprobs": ITS_MODEL,
    "single_chat_session": ITS_MODEL,
    "complex_message_content": ITS_MODEL,
    "default_limit": INSIDE,
    "test_structured_outputs_json_chat": ITS_MODEL,
    "test_structured_outputs_regex_chat": ITS_MODEL,
    "test_structured_outputs_choice_chat": ITS_MODEL,
    "test_named_tool_use": ITS_MODEL,
    "tokenize_chat_with_tools": "where the template knows no tools, a system message tells of them",
    "custom_role": ENDLESS,
    "extra_fields_allowed": ENDLESS,
    "response_format_json": ENDLESS,
    "function_tool_use": ENDLESS,
    "test_empty_prompt": "it wants the words of vLLM's message",
    "server_fixture": "a flag of vLLM's command line",
    "test_token_in_token_out": "a server without a tokenizer, of weights from the network",
}
"""Parts of tests' names."""


class Placeholder:
    """Whatever vLLM has of that name; a test that calls it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"{INSIDE}: {self._name}")

    def __repr__(self) -> str:
        return self._name


class Folder:
    """Takes the place of a library that downloads."""

    def snapshot_download(self, **_: Any) -> str:
        """Nothing is downloaded: servers of tests' adapters are not started."""
        return ""


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer of the served model, from the folder TOKENIZER."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])


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

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        known = {"base_url": f"{self.base}/v1", "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {**known, **given}

    def get_client(self, **options: Any) -> openai.OpenAI:
        """A client of it."""
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """A client of it, for asyncio."""
        return openai.AsyncOpenAI(**self._options(options))


KNOWN: dict[str, dict[str, Any]] = {
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": []},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": Folder},
}
"""What is no placeholder."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of vLLM and torch that tests import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See the base: ours, if it is theirs."""
        if name == "tests.utils" or name.split(".")[0] in ("vllm", "torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """See the base: known names, and placeholders for all others."""
        name = module.__name__
        vars(module).update(KNOWN.get(name, {}))

        def missing(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Placeholder(f"{name}.{attribute}")

        vars(module)["__getattr__"] = missing


sys.meta_path.insert(0, Finder())


def _with_key(make: Any = requests.Session.__init__) -> Any:
    def begin(session: requests.Session) -> None:
        make(session)
        session.headers["Authorization"] = f"Bearer {RemoteOpenAIServer.DUMMY_API_KEY}"

    return begin


requests.Session.__init__ = _with_key()  # type: ignore[method-assign]
"""Some tests know no keys."""


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    """What vLLM's own fixture downloads."""
    return ""


@pytest.fixture
def sample_regex() -> str:
    """A grammar for answers."""
    return r"(1?[0-9]{1,2}\.){3}1?[0-9]{1,2}"


@pytest.fixture
def sample_structured_outputs_choices() -> list[str]:
    """Answers to choose from."""
    return ["Ada", "Basic", "Cobol", "Fortran"]


@pytest.fixture
def sample_json_schema() -> dict[str, Any]:
    """A form of answers, that ends soon."""
    word = {"type": "string", "maxLength": 8}
    return {
        "type": "object",
        "properties": {"name": word, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what does not apply, with the reason."""
    for item in items:
        for part, reason in NOT_SERVED.items():
            if part in item.name or part in item.path.name:
                item.add_marker(pytest.mark.skip(reason=reason))
                break
