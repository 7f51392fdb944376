"""Ops of the hot path, each one object (`op.py`): its reference in plain torch, which documents it,
and implementations for a GPU and, of some, for a CPU.

`all_ops.py` lists them, and binds them once for an engine. No op waits for the device or reads a
plan: what shapes a tensor comes from `BatchDimensions`. docs/gpus.md is the guide.
"""
