"""All tool formats, and which of them a model writes."""

from __future__ import annotations

from megatron_async.errors import ConfigurationError
from megatron_async.server.chat.hermes import HermesFormat
from megatron_async.server.chat.llama3_json import Llama3JsonFormat
from megatron_async.server.chat.mistral import MistralFormat
from megatron_async.server.chat.tool_format import ToolFormat

FORMATS: dict[str, ToolFormat] = {
    one.name: one for one in (HermesFormat(), Llama3JsonFormat(), MistralFormat())
}


def format_of_template(template: str, name: str | None = None) -> ToolFormat:
    """The format of a name; without one, that which the chat template speaks of, or Hermes', which
    is told to models whose template speaks of none.

    Raises:
        ConfigurationError: there is no such format.
    """
    if name is not None:
        if name not in FORMATS:
            raise ConfigurationError(
                f"there is no tool parser {name!r}: use one of {', '.join(FORMATS)}."
            )
        return FORMATS[name]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" not in template and '"parameters"' in template and "ipython" in template:
        return FORMATS["llama3_json"]
    return FORMATS["hermes"]
