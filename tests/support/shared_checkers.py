"""Processes that check grammars, shared by the engines of many schedules: to start one takes longer
than most schedules, and it keeps nothing of a grammar."""

from megatron_async import DynamicInferenceEngine
from megatron_async.text.grammar_compiler import AT_ONCE, GrammarChecker

_idle: dict[str, list[GrammarChecker]] = {}
"""By what they were told of a tokenizer."""


def lend_checkers(engine: DynamicInferenceEngine) -> None:
    """Let an engine use running processes; they go on when it is closed."""
    described = engine.grammars._read_tokenizer()
    checkers = [GrammarChecker(described) for _ in range(AT_ONCE)]  # started when they are asked
    engine.grammars._idle = _idle.setdefault(str(described), checkers)
