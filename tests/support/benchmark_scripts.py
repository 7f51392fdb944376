"""Scripts under `scripts/`, run in this process; their records."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.lab import http_trace

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NOTE = {"benchmark", "date", "gpu", "commit", "torch", "settings", "figures"}


def load_script(name):
    spec = spec_from_file_location(name, next(SCRIPTS.rglob(f"{name}.py")))
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_script(name, tmp_path, *arguments, context=None):
    """Run a benchmark in this process; return its record. With the multiprocessing context of
    `ranks.quick_context` its processes are forked from a server that has imported torch: by itself
    each takes seconds for that."""
    path = tmp_path / "results" / f"{name}.json"
    script = load_script(name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if context is not None:
            monkeypatch.setattr("child_processes.SPAWN", context)
            quick = SimpleNamespace(get_context=lambda _: context)
            monkeypatch.setattr(http_trace, "multiprocessing", quick)
        script.main([*map(str, arguments), "--json", str(path)])
    record = json.loads(path.read_text())
    assert set(record) == NOTE
    assert record["gpu"] is None
    assert "json" not in record["settings"]
    return record
