"""inspect-ai: an evaluation with a tool by each protocol that it can speak to this server.

    BASE_URL=http://127.0.0.1:8000/v1 API_KEY=k MODEL=m python scripts/clients/ask_inspect_ai.py

scripts/check_clients.sh runs it.
"""

import importlib.metadata
import os
import tempfile
from typing import Any

from inspect_ai import Task, eval  # type: ignore[import-not-found]
from inspect_ai.dataset import Sample  # type: ignore[import-not-found]
from inspect_ai.model import GenerateConfig, Model, get_model  # type: ignore[import-not-found]
from inspect_ai.scorer import includes  # type: ignore[import-not-found]
from inspect_ai.solver import generate, use_tools  # type: ignore[import-not-found]
from inspect_ai.tool import tool  # type: ignore[import-not-found]

MODEL, URL, KEY = os.environ["MODEL"], os.environ["BASE_URL"], os.environ["API_KEY"]
FOLDER = os.environ.get("INSPECT_LOG_DIR") or tempfile.mkdtemp(prefix="inspect-ai-")
"""For its logs, which it reads back later."""


@tool
def paint() -> Any:
    """A tool with one argument."""

    async def execute(color: str) -> str:
        """Paint the wall.

        Args:
            color: red or blue.
        """
        return f"The wall is {color}."

    return execute


def model(name: str, url: str, **options: Any) -> Model:
    """A model of the server, asked by one protocol."""
    config = GenerateConfig(max_tokens=48, temperature=0)
    return get_model(name, base_url=url, api_key=KEY, config=config, memoize=False, **options)


def main() -> None:
    """One evaluation for each protocol; the first that fails raises."""
    models = {
        "chat completions": model(f"openai-api/local/{MODEL}", URL),
        "responses": model(f"openai-api/local/{MODEL}", URL, responses_api=True),
        "messages": model(f"anthropic/{MODEL}", URL.removesuffix("/v1")),
    }
    tasks = {
        "plain": [generate()],
        "tool": [use_tools(paint(), tool_choice="auto"), generate(tool_calls="single")],
    }
    for protocol, one in models.items():
        for name, solver in tasks.items():
            sample = Sample(input="What is the capital of France?", target="Paris")
            task = Task(dataset=[sample], solver=solver, scorer=includes(), name=name)
            log = eval(task, model=one, log_dir=FOLDER, display="none")[0]
            assert log.status == "success", (protocol, name, log.error)
            assert log.samples is not None
            print(f"{protocol}, {name}: {log.samples[0].output.completion[:60]!r}")
    print(f"inspect-ai {importlib.metadata.version('inspect-ai')}: all well")


if __name__ == "__main__":
    main()
