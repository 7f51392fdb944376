"""Watching a running engine: its events (`listener.py`), ranges, a timeline, log lines, metrics.

Counters are in `engines/statistics.py`; reports are made of them in `profiling/`.
"""
