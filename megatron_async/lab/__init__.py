"""The laboratory beside the engine: recordings, their replay, serving in virtual time, simulated
fleets (`fleets/`), profiles, benchmarks' loads, and two checks: of tokens against a reference, and
of answers against themselves in other company (`check_run.py`).

No other room imports this one: the command line (`cli/main.py`) and `LLM(record=...)` find what
they need by its name. docs/simulation.md is the guide; `scripts/check_parity.py` the check.
"""
