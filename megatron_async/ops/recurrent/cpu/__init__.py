"""Ops of recurrent layers on a CPU (`host_recurrent.py`), the loops of what is done once a step and
what all loops share (`step_loops.py`), and those of decode rows (`decode_loops.py`)."""
