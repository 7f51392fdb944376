"""Records of a running engine: ranges, a timeline, metrics.

Counters are in `engines/statistics.py`; reports are made of them in `profiling/`.
"""
