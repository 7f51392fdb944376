"""Loads of `benchmark_engine.py`, a file each."""
