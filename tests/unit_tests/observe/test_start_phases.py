"""How long a start took, by its phases."""

from types import SimpleNamespace

import pytest

from megatron_async import LLM
from megatron_async.observe import start_phases


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.0, 3.5, 4.0, 4.5, 5.0])
    monkeypatch.setattr(start_phases, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    phases = start_phases.StartPhases()
    with phases.phase("read weights"):
        pass
    with pytest.raises(OSError, match="full"), phases.phase("capture steps"):
        raise OSError("full")
    with phases.phase("capture steps"):
        pass
    assert str(phases) == "ready after 5.0 s: read weights 2.0, capture steps 1.0"


def test_an_engine_tells_its_start() -> None:
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=8) as llm:
        names = [*llm.start_phases.seconds]
    assert names[0] == "build the model"
    assert names[-1] == "capture steps"
    assert all(seconds >= 0 for seconds in llm.start_phases.seconds.values())
