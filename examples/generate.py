"""Several prompts at once through the async engine, and a chat.

.venv/bin/python examples/generate.py
"""

from megatron_async import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The first prime numbers are 2, 3, 5,"]
SHOWN = ("tokens_per_second", "steps", "overlap_ratio", "zombie_rows", "cpu_us_per_step")


def main() -> None:
    """Greedy completions of the demo model, an answer by its chat template, and some counters."""
    with LLM("smollm2", lookahead=1) as llm:
        sampling = SamplingParams(num_tokens_to_generate=32, temperature=0.0)
        for request in llm.generate(PROMPTS, sampling):
            print(f"{request.prompt!r} -> {request.generated_text!r} ({request.finish_reason})")
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        print(f"\n{question[0]['content']}\n{llm.chat(question)[0].generated_text}\n")
        statistics = llm.engine.stats()
        for name in SHOWN:
            print(f"{name:>24}  {statistics[name]:.2f}")


if __name__ == "__main__":
    main()
