"""The laboratory beside the engine: recordings, their replay, serving in virtual time, simulated
fleets (`fleets/`), profiles, benchmarks' loads, and the check of tokens against a reference.

No other room imports this one: the command line (`cli/main.py`) and `LLM(record=...)` find what
they need by its name. docs/simulation.md is the guide; `scripts/check_parity.py` the check.
"""
