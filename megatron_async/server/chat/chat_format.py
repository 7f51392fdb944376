"""`ChatFormat`: how the served model's chats are written, and how its answers are read."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.server.chat.answer_pieces import CallBegin, CallReader
from megatron_async.server.chat.call_formats import (
    FORMATS,
    HARMONY,
    NEMOTRON,
    CallFormat,
    check_parsers,
    format_of_template,
    parser_name,
)
from megatron_async.server.chat.calls_reader import CallsReader
from megatron_async.server.chat.harmony import (
    EFFORTS,
    ChannelReader,
    begun_header,
    channel_messages,
    grammar_behind_messages,
)
from megatron_async.server.chat.messages import (
    last_text,
    template_messages,
    template_variables,
    with_ids_of,
    with_json_text,
)
from megatron_async.server.chat.template_renderer import TemplateRenderer
from megatron_async.server.chat.thoughts import CLOSE, OPEN, grammar_behind_thought
from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.request_bodies import ChatRequest
from megatron_async.serving.model_card import ModelCard
from megatron_async.text.harmony import MARKS, marked, marks_of
from megatron_async.text.structured_output import StructuredOutput
from megatron_async.text.tokenizer import Tokenizer

INTRODUCTION = (
    "You may call functions. Each line below describes one as JSON.\n{tools}\n"
    "To call a function, answer with its name and arguments like this, and nothing else:\n{example}"
)


def with_tools_told(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], tool_format: CallFormat
) -> list[dict[str, Any]]:
    """The messages with a description of tools in the system message; calls and their results as
    plain text."""
    told = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INTRODUCTION.format(tools=told, example=tool_format.written("NAME", "{...}"))
    found = [_plain(message, tool_format) for message in messages]
    if found[0]["role"] == "system":
        text = f"{found[0]['content']}\n\n{text}".lstrip()
        found = found[1:]
    return [{"role": "system", "content": text}, *found]


def _plain(message: dict[str, Any], tool_format: CallFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the call: {message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(
        tool_format.written(
            call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        )
        for call in calls
    )
    return {"role": message["role"], "content": f"{message['content']}\n{written}".lstrip()}


logger = logging.getLogger("megatron_async")

PROBE, QUESTION = "get_value_of_key", "Which value has the key?"
"""Function and question of the chat whose call is read back."""
PROBES = [
    {
        "type": "function",
        "function": {
            "name": PROBE,
            "description": "Tells the value of a key.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]
MARK = "\ue000continue\ue001"
"""Stands behind the text that is continued, so that its end is found in the rendered chat."""


class ChatFormat:
    """Chats of one model. Without a tokenizer chats are refused.

    Attributes:
        thoughts: answers may hold thoughts: `<think>` ... `</think>`, by the template or the
            vocabulary; or harmony's.
        can_think: so, or the template can be told to think.
        tool_format: how calls are written.
        special: ids by text of the tool format's special tokens, those that the tokenizer has as
            such.
        marks: of harmony: id -> character (`text/harmony.py`); empty: the chats are of another
            form.

    Raises:
        ConfigurationError: there is no such parser, or the tokenizer has no tokens for it.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer | None,
        tool_parser: str | None,
        template_bytes: int,
        reasoning_parser: str | None = None,
    ) -> None:
        self._template = card.chat_template or ""
        self._tells: bool | None = None
        self._is_named = tool_parser is not None
        self._wants_json_text = False
        self._renderer = TemplateRenderer(tokenizer, template_bytes)
        self.thoughts = OPEN in self._template or CLOSE in self._template
        added = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
        self.tool_format = self._form(tokenizer, tool_parser, reasoning_parser)
        self.marks: dict[int, str] = {}
        if self.tool_format is HARMONY and tokenizer is not None:
            self.marks, reasoning_parser = marks_of(tokenizer.backend), None
        self._reasoning = reasoning_parser and parser_name(reasoning_parser)
        self.thoughts |= self._reasoning is not None or bool(self.marks)
        self.thoughts |= any(token.content == OPEN for token in added.values())
        self.can_think = self.thoughts or "thinking" in self._template
        self.special = {
            token.content: index
            for index, token in added.items()
            if token.special and token.content in self.tool_format.special
        }

    def _form(
        self, tokenizer: Tokenizer | None, tool_parser: str | None, reasoning_parser: str | None
    ) -> CallFormat:
        """The tool format that is named, or else the template's. Harmony, unless it is named, only
        with its tokens; where no parser is named and the template has no known form, by them."""
        is_named = check_parsers(tool_parser, reasoning_parser)
        has_tokens = tokenizer is not None and bool(marks_of(tokenizer.backend))
        if is_named and tokenizer is not None and not has_tokens:
            absent = [name for name in MARKS if tokenizer.backend.token_to_id(name) is None]
            raise ConfigurationError(
                f"the parser {tool_parser or reasoning_parser!r} needs harmony's special tokens, "
                f"and this model's tokenizer has no {absent[0]}: leave it out."
            )
        found = format_of_template(self._template, tool_parser)
        is_known = any(row.is_of(self._template) for row in FORMATS.values())
        by_itself = has_tokens and tool_parser is None and reasoning_parser is None
        if is_named or (by_itself and (found is HARMONY or not is_known)):
            return HARMONY
        return FORMATS["hermes"] if found is HARMONY else found

    def prepare(self) -> None:
        """Start the process for templates, render a first chat, and tell the log if the template
        writes calls of tools in another form than the one that is read."""
        self._renderer.prepare()
        if self._tells_tools() and not self._is_named and not self._reads_own_calls():
            logger.warning(
                "The chat template writes calls of tools in a form that is not known here: in "
                "answers they come as text, and forced calls are written in the form %s. Name the "
                "model's form with --tool-parser, one of %s.",
                self.tool_format.name,
                ", ".join(FORMATS),
            )

    def _tells_tools(self) -> bool:
        """Whether the template writes the tools of a chat; one that only has the word, as Phi-4's,
        which looks for tools in a message, does not."""
        if self._tells is None:
            tells = "tools" in self._template
            message = {"role": "user", "content": QUESTION}
            chat = {"messages": [message], "tools": PROBES, "add_generation_prompt": True}
            # A template may want other messages; and on an event loop it may take too long.
            with contextlib.suppress(Refusal):
                tells = tells and PROBE in self._renderer.render(chat)
            self._tells = tells
        return self._tells

    def _reads_own_calls(self) -> bool:
        """Whether a call that the template writes is read as one; of a template that writes none,
        whether it has the form's marks."""
        call = {"id": "call00001", "function": {"name": PROBE, "arguments": {"key": "value"}}}
        request = msgspec.convert(
            {
                "messages": [
                    {"role": "user", "content": QUESTION},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": "value", "tool_call_id": "call00001"},
                ],
                "add_generation_prompt": False,
            },
            ChatRequest,
        )
        try:
            text = self.render(request, PROBES)
        except Refusal:  # it wants other messages
            return True
        text = text.rpartition(QUESTION)[2]
        if PROBE not in text:
            return self.tool_format.is_of(self._template)
        if self.tool_format.is_bare:
            text = text[max(text.find("{"), 0) :]
        reader: CallReader = ChannelReader("", {PROBE: {}})
        if not self.marks:
            reader = CallsReader(self.tool_format, {PROBE: {}})
        text = marked(text) if self.marks else text
        return CallBegin(PROBE) in reader.push(text) + reader.end()

    def close(self) -> None:
        """End the process for templates."""
        self._renderer.close()

    def render(self, request: ChatRequest, tools: Sequence[dict[str, Any]] | None) -> str:
        """The chat as the model's text."""
        messages = template_messages(request.messages)
        if self.marks:
            messages = channel_messages(messages, bool(request.continue_final_message))
        if tools and not self._tells_tools():
            messages, tools = with_tools_told(messages, tools, self.tool_format), None
        if self.tool_format.id_length is not None:
            messages = with_ids_of(messages, self.tool_format.id_length)
        begins_answer = request.add_generation_prompt is not False
        if request.continue_final_message:
            if request.add_generation_prompt:
                raise Refusal(
                    "continue_final_message and add_generation_prompt exclude each other: "
                    "give one.",
                    param="continue_final_message",
                )
            begins_answer = False
            messages[-1] = {**messages[-1], "content": last_text(messages) + MARK}
        variables = template_variables(request) | {
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": request.documents,
            "add_generation_prompt": begins_answer,
        }
        effort = variables.get("reasoning_effort", EFFORTS[0])
        if self.marks and effort not in EFFORTS:
            raise not_allowed("reasoning_effort", effort, '"low", "medium" or "high"')
        text = self._written(variables)
        if not request.continue_final_message:
            return text
        if text.count(MARK) != 1:
            raise Refusal(
                "the last message cannot be continued: the model's chat template does not write it "
                "as it is.", param="continue_final_message",
            )  # fmt: skip
        return text[: text.index(MARK)]

    def _written(self, variables: dict[str, Any]) -> str:
        """The text of the template. Most want the arguments of calls as objects; DeepSeek's own as
        JSON text, which they join to other texts."""
        messages = variables["messages"]
        if not any("tool_calls" in message for message in messages):
            return self._renderer.render(variables)
        as_text = variables | {"messages": with_json_text(messages)}
        try:
            return self._renderer.render(as_text if self._wants_json_text else variables)
        except Refusal as refusal:
            if self._wants_json_text or "concatenate str" not in refusal.message:
                raise
            text = self._renderer.render(as_text)
            self._wants_json_text = True
            return text

    def starts_in_thought(self, prompt: str) -> bool:
        """Whether the prompt has opened a thought that the answer is to end; with a parser of
        thoughts, whether it has closed none at its end."""
        end = prompt.rstrip()
        if self._reasoning is not None:
            return not end.endswith(CLOSE)
        return self.thoughts and prompt.rfind(OPEN) > prompt.rfind(CLOSE) and end.endswith(OPEN)

    def begun(self, prompt: str) -> str | None:
        """What a prompt has begun of the answer's first message (`begun_header`); None where the
        chats are not of harmony."""
        return begun_header(prompt) if self.marks else None

    def fills_content(self, request: ChatRequest) -> bool:
        """Whether a thought without content is given as content: Nemotron's rule, where the request
        turns thoughts off or asks for it (Megatron-Core's `NemotronV3ReasoningParser`)."""
        given = request.chat_template_kwargs or {}
        asks = given.get("enable_thinking") is False or given.get("force_nonempty_content") is True
        return self._reasoning in NEMOTRON and asks

    def behind_thought(
        self, wanted: StructuredOutput, prompt: str, has_calls: bool, has_format: bool
    ) -> StructuredOutput:
        """A grammar that lets a thought come first and demands `wanted` of the text behind it:
        calls, a format of the content, or one of both."""
        try:
            if self.marks:
                begun = begun_header(prompt)
                grammar = grammar_behind_messages(
                    wanted, begun, self.special, has_calls, has_format
                )
            else:
                grammar = grammar_behind_thought(wanted, self.starts_in_thought(prompt))
        except RequestError as error:
            raise Refusal(f"structured_outputs: {error}", param="structured_outputs") from error
        return StructuredOutput(grammar=grammar)

    def continued_text(self, request: ChatRequest) -> str:
        """The text of the last message, if the answer continues it."""
        if not request.continue_final_message:
            return ""
        return last_text(template_messages(request.messages))
