"""instructor, by tools, JSON mode and a JSON schema; arguments as those of ask_openai.py."""

import os
from typing import Literal

import instructor  # type: ignore[import-not-found]
import openai
from pydantic import BaseModel


class Wall(BaseModel):
    """What the model must answer."""

    color: Literal["red", "blue"]


def main() -> None:
    """The same question in each mode."""
    raw = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(raw, mode=mode)
        wall = client.chat.completions.create(
            model=os.environ["MODEL"],
            response_model=Wall,
            max_tokens=100,
            max_retries=0,
            messages=[{"role": "user", "content": "Which color has the sky: red or blue?"}],
        )
        assert wall.color in ("red", "blue")
        print(f"{mode}: well")


if __name__ == "__main__":
    main()
