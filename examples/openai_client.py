"""Ask a server by OpenAI's client: a streamed chat, and an answer in a given form.

    megatron-async serve smollm2                      # in one terminal
    pip install openai; python examples/openai_client.py

Any client of OpenAI's protocol works alike: it needs the address, and a key where the server has
one.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import openai

SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
            "required": ["name", "country"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    """Ask twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--question", default="Why is the sky blue?")
    arguments = parser.parse_args()
    key = os.environ.get("MEGATRON_ASYNC_API_KEY", "none")
    client = openai.OpenAI(base_url=arguments.url, api_key=key)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(
            f"no server answers at {arguments.url}: start `megatron-async serve smollm2` first"
        )
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=64,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a city in Europe, as JSON."}],
        max_tokens=64,
        temperature=0.0,
        response_format=SCHEMA,
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
