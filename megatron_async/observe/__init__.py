"""Watching a running engine: counters (`statistics.py`), its events (`listener.py`), ranges, a
timeline, log lines, metrics.

Reports are made of these in `lab/`.
"""
