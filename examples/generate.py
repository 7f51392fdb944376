"""Several prompts at once through the async engine.

.venv/bin/python examples/generate.py
"""

from megatron_async import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The first prime numbers are 2, 3, 5,"]


def main() -> None:
    """Greedy completions of the demo model, then what the engine counted."""
    llm = LLM("smollm2", lookahead=1)
    sampling = SamplingParams(num_tokens_to_generate=32, temperature=0.0)
    for request in llm.generate(PROMPTS, sampling):
        print(f"{request.prompt!r} -> {request.generated_text!r} ({request.finish_reason})")
    for name, value in llm.engine.stats().items():
        print(f"{name:>24}  {value}")


if __name__ == "__main__":
    main()
