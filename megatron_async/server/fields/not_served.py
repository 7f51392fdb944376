"""What OpenAI or vLLM have and this server has not: refused by name, where leaving it out would
change the answer. All else that is unknown is ignored."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.shared_fields import SharedFields

NOT_SERVED = {
    "use_beam_search": "beam search is not served: leave it out",
    "prompt_embeds": "embeddings as prompts are not served: send text or token ids",
    "allowed_token_ids": "it is not served: use structured_outputs",
    "thinking_token_budget": "it is not served: leave it out, and limit max_tokens",
    "lora_request": "LoRA adapters are not served: leave it out",
    "lora_path": "LoRA adapters are not served: leave it out",
    "suffix": "text behind the completion is not served: leave it out",
    "chat_template": "templates of requests are not served: the model's own is used",
    "audio": "audio is not served: leave it out",
    "functions": "the old form of tools is not served: use tools",
    "function_call": "the old form of tool_choice is not served: use tool_choice",
    "web_search_options": "the server fetches nothing: leave it out",
    "mm_processor_kwargs": "images and audio are not served: leave it out",
}
"""Field -> what to do. A field counts if it is given and neither null, false nor empty."""


def refuse_fields(request: msgspec.Struct, table: Mapping[str, str]) -> None:
    """Raise Refusal for the first field of a table that a request gives.

    Args:
        request: fields that its struct does not have count as not given.
        table: field -> what to do; as `NOT_SERVED`.
    """
    for name, remedy in table.items():
        if getattr(request, name, None):
            raise Refusal(f"{name} was given, and {remedy}.", param=name)


def refuse_what_is_not_served(request: SharedFields) -> None:
    """Raise Refusal for the first field that asks for what is not served."""
    refuse_fields(request, NOT_SERVED)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise Refusal(
            "best_of is served only where it is n: leave it out, and choose among n answers.",
            param="best_of",
        )
    if set(getattr(request, "modalities", None) or ()) - {"text"}:
        raise Refusal("modalities: only text is served.", param="modalities")
