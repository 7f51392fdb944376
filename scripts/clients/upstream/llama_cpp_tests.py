"""A pytest plugin that runs llama.cpp's tests of its server, in their external mode, against ours.

    cd tools/server/tests
    PORT=8000 DEBUG_EXTERNAL=1 API_KEY=... PYTHONPATH=scripts/clients/upstream:. \\
        pytest -p llama_cpp_tests --noconftest unit/test_chat_completion.py

Their tests know the words of their own small model; here every text is right. Endpoints get the
`/v1` before them that llama.cpp also knows. `NOT_SERVED` says which tests do not apply, and why.
"""

import importlib
import os
from typing import Any

import pytest

utils: Any = importlib.import_module("utils")
"""Theirs: where the tests are."""

COUNTS = "it knows the prompts' lengths in the tokens of its own model"
NOT_SERVED = {
    "test_chat_completion[": COUNTS,
    "test_chat_completion_stream": COUNTS,
    "test_chat_completion_cached_tokens": COUNTS,
    "with_openai_library": "it wants llama.cpp's build number as the fingerprint",
    "chat_template": "a template of its own by the command line, shown in a debug field",
    "continue_final_message_vllm_compat": "shown in a debug field",
    "with_json_schema": "llama.cpp's field; response_format is served",
    "with_grammar": "llama.cpp's field; structured_outputs is served",
    "with_invalid_grammar": "llama.cpp's field; structured_outputs is served",
    "response_format0": "llama.cpp's field `schema` in a json_object",
    "response_format1": "llama.cpp's field `schema` in a json_object",
    "response_format5": "llama.cpp's field `schema` in a json_object",
    "response_format6": "llama.cpp's field `schema` in a json_object",
    "response_format7": "llama.cpp's field `schema` in a json_object",
    "timings_per_token": "llama.cpp's field",
    "return_progress": "llama.cpp's field",
    "context_size_exceeded": "llama.cpp's words of the error",
    "token_count": "llama.cpp's endpoint; /tokenize counts",
    "verbose_debug": "llama.cpp's field",
    "invalid_chat_completion_req[messages7": "two answers in a row are taken, if the template does",
    "logprobs_stream": "a first event's content is null; OpenAI's is the empty text",
}
"""Beginnings or parts of tests' names."""
PATHS = ("/chat/completions", "/completions", "/models")


def _as_ours(path: str) -> str:
    return f"/v1{path}" if path.startswith(PATHS) else path


class Server(utils.ServerProcess):
    """The server at PORT, with the key."""

    def make_request(self, method: str, path: str, data: Any = None, headers: Any = None,
                     **options: Any) -> Any:  # fmt: skip
        """See the base; llama.cpp's `content` of a text to tokenize is `prompt` here."""
        if path == "/tokenize":
            data = {"prompt": data["content"], "add_special_tokens": False}
        given = {"Authorization": f"Bearer {os.environ['API_KEY']}", **(headers or {})}
        return super().make_request(method, _as_ours(path), data, given, **options)

    def make_stream_request(self, method: str, path: str, data: Any = None, headers: Any = None,
                            **options: Any) -> Any:  # fmt: skip
        """See the base."""
        given = {"Authorization": f"Bearer {os.environ['API_KEY']}", **(headers or {})}
        return super().make_stream_request(method, _as_ours(path), data, given, **options)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put ours in the place of theirs; skip what does not apply, with the reason."""
    for item in items:
        parent = item.getparent(pytest.Module)
        assert parent is not None
        module: dict[str, Any] = parent.obj.__dict__
        module["match_regex"] = lambda *_: True
        module["ServerPreset"] = type("Preset", (), {"tinyllama2": staticmethod(Server)})
        make = module.get("OpenAI")
        if make is not None and not hasattr(make, "is_ours"):

            def ours(api_key: str, make: Any = make, **options: Any) -> Any:
                return make(api_key=os.environ["API_KEY"], **options)

            ours.is_ours = True  # type: ignore[attr-defined]
            module["OpenAI"] = ours
        for part, reason in NOT_SERVED.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
                break
