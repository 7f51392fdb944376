"""JSON of a schema, beside an unconstrained request in the same batch.

.venv/bin/python examples/structured_output.py
"""

import json

from megatron_async import LLM, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0},
    },
    "required": ["city", "country", "inhabitants"],
    "additionalProperties": False,
}
PROMPT = "The largest city of France, as JSON with city, country and inhabitants: "


def main() -> None:
    """Greedy answers of the demo model, and the log probs of the constrained one."""
    with LLM("smollm2", lookahead=1) as llm:
        held = SamplingParams(
            num_tokens_to_generate=80,
            temperature=0.0,
            structured_output=StructuredOutput(json_schema=SCHEMA),
            return_log_probs=True,
            skip_prompt_log_probs=True,
        )
        free = SamplingParams(num_tokens_to_generate=40, temperature=0.0)
        answer, other = llm.generate([PROMPT, PROMPT], [held, free])
        overlap = llm.engine.stats()["overlap_ratio"]
    print(json.loads(answer.generated_text or "null"), f"({answer.finish_reason})")
    first = (answer.generated_log_probs or [])[:6]
    print("log probs of its first tokens:", [f"{value:.2f}" for value in first])
    print(f"unconstrained: {other.generated_text!r}")
    print(f"overlap ratio {overlap:.2f}")


if __name__ == "__main__":
    main()
