"""Renders a chat template in a process of its own, so that an endless template does no harm.

It reads JSON lines: first the template and the special tokens, then [variables, limit in seconds of
CPU time]; and answers each with {"text"} or {"error"}. A chat that takes too long or too much
memory ends the process, which its parent can tell (`template_renderer.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any

import jinja2

from megatron_async.text.chat_template import compile_chat_template

MEMORY_LIMIT = 1 << 30
"""Bytes of address space that rendering may take."""
MOST_CHARACTERS = 64 << 20
"""Characters of a rendered chat: a body has 32 MiB, and its parent must read what comes."""


def main() -> None:
    """Serve a parent, until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):  # a system without it, or a lower limit
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    source, special = json.loads(sys.stdin.readline())
    template = compile_chat_template(source)
    for line in sys.stdin:
        variables, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer = _render(template, special | variables)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _render(template: jinja2.Template, variables: dict[str, Any]) -> dict[str, Any]:
    try:
        text = template.render(**variables)
    except Exception as error:  # a template is code, it can raise anything
        return {"error": str(error)[:500] or type(error).__name__}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"the text of the chat has more than {MOST_CHARACTERS} characters"}
    return {"text": text}


if __name__ == "__main__":
    main()
