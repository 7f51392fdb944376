"""Commands that stand beside the engine: `bench`, `profile`, `replay` and two that simulate.

No other room imports this one: the command line finds its commands in a table of names
(`cli/main.py`).
"""
