"""What an engine records while it runs: ranges, a timeline, metrics.

Counters are in `engines/statistics.py`; reports are made of them in `profiling/`.
"""
