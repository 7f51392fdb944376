"""litellm, by its providers for servers of OpenAI's kind; arguments as those of ask_openai.py."""

import os
from typing import Any

import litellm  # type: ignore[import-not-found]

COMMON: dict[str, Any] = {
    "api_base": os.environ["BASE_URL"],
    "api_key": os.environ["API_KEY"],
    "max_tokens": 6,
    "temperature": 0,
}
MESSAGES = [{"role": "user", "content": "Say hello."}]


def main() -> None:
    """Whole and streamed answers of three providers."""
    for provider in ("openai", "hosted_vllm"):
        model = f"{provider}/{os.environ['MODEL']}"
        whole = litellm.completion(model=model, messages=MESSAGES, **COMMON)
        chunks = litellm.completion(model=model, messages=MESSAGES, stream=True, **COMMON)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content, (text, whole)
        print(f"{provider}: well")
    model = f"text-completion-openai/{os.environ['MODEL']}"
    answer = litellm.text_completion(model=model, prompt="One, two,", **COMMON)
    assert answer.choices[0].text, answer
    print("text-completion-openai: well")


if __name__ == "__main__":
    main()
