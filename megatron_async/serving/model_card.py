"""`ModelCard`: the facts of a model that clients need for prompts and texts.

Replicas register it with the coordinator, which keeps it without reading it; clients fetch it once.
"""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer as BackendTokenizer

from megatron_async.text.tokenizer import Tokenizer, TokenizerError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model.

    Attributes:
        model: name or path of the loaded model, as given to the replica.
        tokenizer_json: a `tokenizer.json`; None without a tokenizer, and where it cannot be sent.
        tokenizer_config: the fields of a `tokenizer_config.json`.
        eos_ids: tokens that end a generation, the tokenizer's own first.
        generation_config: the fields of the model's `generation_config.json`, if it has one.
        replica_makes_text: the tokenizer cannot be sent, so the replica makes the texts.
        max_sequence_length: most tokens of prompt and answer.
        vocab_size: columns of the logits.
        device: that it runs on, as "cpu" or "cuda"; "": not known.
        batch_invariant_mode: of the engine.
        digest: of all other fields but the device, which tokens do not depend on.
    """

    model: str
    tokenizer_json: bytes | None = None
    tokenizer_config: dict[str, Any] = {}
    chat_template: str | None = None
    eos_ids: list[int] = []
    generation_config: dict[str, Any] = {}
    replica_makes_text: bool = False
    max_sequence_length: int
    vocab_size: int
    block_size_tokens: int
    num_speculative_tokens: int = 0
    device: str = ""
    batch_invariant_mode: bool = False
    digest: str = ""

    def tokenizer(self) -> Tokenizer | None:
        """A new tokenizer object, equal to the replicas'; None if the model has none. Takes as long
        as reading its file: up to a second.

        Raises:
            TokenizerError: it cannot be read.
        """
        if self.tokenizer_json is None:
            return None
        try:
            backend = BackendTokenizer.from_str(self.tokenizer_json.decode())
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"the card of {self.model}: {error}") from error
        return Tokenizer(
            backend, self.tokenizer_config, self.eos_ids, self.chat_template, self.model
        )

    def encode(self) -> bytes:
        """The card as a coordinator keeps it."""
        return msgspec.msgpack.encode(self)


def decode_card(data: bytes) -> ModelCard:
    """A card that `encode` has made; msgspec.DecodeError for what is none."""
    return msgspec.msgpack.decode(data, type=ModelCard)
