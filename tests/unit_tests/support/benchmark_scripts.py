"""Scripts under `scripts/`, run in this process; their records."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
NOTE = {"benchmark", "date", "gpu", "commit", "torch", "settings", "figures"}


def load_script(name):
    spec = spec_from_file_location(name, next(SCRIPTS.rglob(f"{name}.py")))
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_script(name, tmp_path, *arguments):
    """Run a benchmark in this process; return its record."""
    path = tmp_path / "results" / f"{name}.json"
    load_script(name).main([*map(str, arguments), "--json", str(path)])
    record = json.loads(path.read_text())
    assert set(record) == NOTE
    assert record["gpu"] is None
    assert "json" not in record["settings"]
    return record
