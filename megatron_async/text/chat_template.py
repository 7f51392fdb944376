"""Chat templates: jinja2 in the dialect that models' files are written in, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox


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


def _to_json(value: Any, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
