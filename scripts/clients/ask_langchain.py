"""langchain-openai: invoke, stream and structured output; arguments as those of ask_openai.py."""

import os
from typing import Literal

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel, SecretStr


class Wall(BaseModel):
    """What the model must answer."""

    color: Literal["red", "blue"]


def main() -> None:
    """What chains do most."""
    chat = ChatOpenAI(
        model=os.environ["MODEL"],
        base_url=os.environ["BASE_URL"],
        api_key=SecretStr(os.environ["API_KEY"]),
        max_completion_tokens=60,
        temperature=0,
        max_retries=0,
    )
    whole = chat.invoke("Say hello.").content
    streamed = "".join(chunk.content for chunk in chat.stream("Say hello."))
    assert streamed == whole, (streamed, whole)
    for method in ("json_schema", "function_calling"):
        wall = chat.with_structured_output(Wall, method=method).invoke("Red or blue?")
        assert wall.color in ("red", "blue")
        print(f"{method}: well")


if __name__ == "__main__":
    main()
