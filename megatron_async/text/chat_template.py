"""Chat templates: jinja2 in the dialect that models' files are written in, in a sandbox; and where
a model's files have them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from megatron_async.errors import ConfigurationError
from megatron_async.json_objects import MIB, read_object, read_text

CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of further templates, each under the name of its file."""
OLD_TEMPLATE = "chat_template.json"
"""Where processors of models with a vision tower had theirs."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates: for all chats, and for chats in which tools are offered."""
LARGEST_TEMPLATE = 4 * MIB
"""Bytes; published ones have up to 30 KiB."""


def folder_template(
    folder: Path, config: Mapping[str, Any], error: type[ConfigurationError]
) -> str | None:
    """The template (jinja2 source) of a Hugging Face folder: of its files, else of its
    `tokenizer_config.json`; None if there is none. `error` is the class of what is raised."""
    value = config.get("chat_template")
    if isinstance(value, list):  # of objects, in older files
        value = {e.get("name"): e.get("template") for e in value if isinstance(e, Mapping)}
    if isinstance(value, str):
        value = {DEFAULT: value}
    found: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
    files = {DEFAULT: folder / CHAT_TEMPLATE}
    files |= {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    there = {name: file for name, file in files.items() if file.is_file()}
    found |= {name: read_text(file, error, LARGEST_TEMPLATE) for name, file in there.items()}
    if not found and (folder / OLD_TEMPLATE).is_file():
        found = {DEFAULT: read_object(folder / OLD_TEMPLATE, error).get("chat_template")}
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in found.items()):
        raise error(f"{folder}: its chat templates must be texts with names, not {found!r:.200}")
    return join_templates(found)


def join_templates(templates: Mapping[str, str]) -> str | None:
    """One template of several, by name: with tools that which is made for tools, else the default
    one. The names of others say when a person may choose them, so no chat gets them by itself."""
    if WITH_TOOLS not in templates:
        default = templates.get(DEFAULT)
        return _no_default(templates) if default is None and templates else default
    default = templates.get(DEFAULT, _no_default(templates))
    # As alone, each begins a line and loses the line break at its end; "+" keeps blanks before.
    first, second = (
        re.sub(r"(\r\n|\r|\n)\Z", "", text) for text in (templates[WITH_TOOLS], default)
    )
    return (
        f"{{% if tools is defined and tools is not none %}}\n{first}{{%+ else %}}\n{second}"
        "{%+ endif %}"
    )


def _no_default(templates: Mapping[str, str]) -> str:
    names = ", ".join(sorted(templates))
    return (
        f"{{{{ raise_exception({f'the model has templates {names}, and none for this chat'!r}) }}}}"
    )


def compile_chat_template(source: str) -> jinja2.Template:
    """A template in a sandbox: it is code that came with a download.

    Raises:
        jinja2.TemplateSyntaxError: it is none.
    """
    # Block trimming and loop controls are what templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
