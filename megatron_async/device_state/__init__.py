"""The device's side of a plan: its bookkeeping, per-slot state and KV cache.

The CPU's side is in `planning/`. The first kernel of a step (`unpack_step.py`) and the last
(`feed_back.py`) are here, because they read and write these arrays; all others are in `ops/`.
"""
