"""pydantic-ai, with output by a tool and by a schema; arguments as those of ask_openai.py."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]


class Wall(BaseModel):
    """What the model must answer."""

    color: Literal["red", "blue"]


def main() -> None:
    """The same question, answered in two ways."""
    provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
    for kind in (ToolOutput, NativeOutput):
        agent = Agent(model, output_type=kind(Wall), model_settings={"max_tokens": 100})
        answer = agent.run_sync("Which color has the sky: red or blue?").output
        assert answer.color in ("red", "blue")
        print(f"{kind.__name__}: well")


if __name__ == "__main__":
    main()
