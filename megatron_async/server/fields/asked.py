"""`Asked`: an HTTP request in the engine's terms, and what formats its answer.

Structs and not dataclasses: a frozen dataclass takes a call for each field of a new object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.chat.tool_choice import NO_TOOLS, ToolPlan
from megatron_async.server.fields.refusal import Refusal, refusal_of


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request. An administrator's priority counts as it is.

    Attributes:
        owner: name of the API key, "" without one; it is mixed into the cache salt.
    """

    owner: str = ""
    is_admin: bool = False


NOBODY = Caller()


class ChatStyle(msgspec.Struct, frozen=True):
    """How the text of a chat's answer is split into parts.

    Attributes:
        thoughts: the text may hold thoughts.
        starts_in_thought: the prompt has opened a thought.
        begun: of harmony's first message, by the prompt (`begun_header`); None: of other forms.
        gives_thoughts: as `reasoning_content`; False: they are left out.
        plan: of the request's tools; of one function by its name finish_reason is "stop".
        fills_content: a thought without content is given as content, in an answer that is whole.
        many_calls: more than one call is given.
        prefix: what the answer's text begins with (`echo` of the continued message).
    """

    thoughts: bool = False
    starts_in_thought: bool = False
    begun: str | None = None
    gives_thoughts: bool = True
    fills_content: bool = False
    plan: ToolPlan = NO_TOOLS
    many_calls: bool = True
    prefix: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the text is the content as it is."""
        return not self.thoughts and self.plan.format is None


PLAIN = ChatStyle()


class AnswerStyle(msgspec.Struct, frozen=True):
    """How an answer is written.

    Attributes:
        id: of the answer: "cmpl-...", "chatcmpl-...", "resp_..." or "msg_...".
        created: seconds since 1970.
        model: as the request called it.
        is_stream: as events.
        include_usage: a stream ends with the numbers of tokens.
        continuous_usage: every event of a stream has them.
        top_n: the log prob of each token and this many beside it; None: no log probs.
        prompt_top_n: the same of the prompt in `prompt_logprobs`; None: none.
        echo: a completion's text begins with the prompt.
        is_scoring: nothing is generated (max_tokens 0 with echo or prompt_logprobs).
        gives_token_ids: of prompt and answer.
        gives_versions: of the weights that made its tokens.
        names_by_id: tokens in log probs are called "token_id:123".
        keeps_special_tokens: in the text.
        chat: of a chat's answer.
        format_field: the field of a chat or completion that its text's format is of.
        field_names: of chats -> of the request, where it was translated to a chat.
        megatron_fields: of a message or completion, beside ours (`ServedModel.as_megatron`).
        repeated: fields of the request that the answer repeats, by name.
    """

    id: str
    created: int
    model: str
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top_n: int | None = None
    prompt_top_n: int | None = None
    echo: bool = False
    is_scoring: bool = False
    gives_token_ids: bool = False
    gives_versions: bool = False
    names_by_id: bool = False
    keeps_special_tokens: bool = False
    chat: ChatStyle = PLAIN
    format_field: str = "response_format"
    field_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    megatron_fields: tuple[str, ...] = ()
    repeated: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def refusal(self, kind: str, message: str) -> Refusal:
        """`refusal_of` an answer that failed, in the fields of its request."""
        return refusal_of(kind, message, self.format_field).at(self.field_names)


class AskedChoice(msgspec.Struct, frozen=True):
    """One request to the engine.

    Attributes:
        prompt: its place in `Asked.prompts`.
        params: for the engine; no two choices share them.
    """

    index: int
    prompt: int
    params: SamplingParams


class Asked(msgspec.Struct, frozen=True):
    """What the engine is asked for one HTTP request.

    Attributes:
        prompts: token ids, or a text where only the replica has the tokenizer.
        priority: ours: higher is served earlier.
    """

    prompts: list[Sequence[int] | str]
    choices: list[AskedChoice]
    priority: int
    style: AnswerStyle
