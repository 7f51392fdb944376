"""Exchanges between pipeline stages in each step.

Which layers a stage has is decided in `models/pipeline.py`, which requests share a step in
`contexts/micro_batches.py`. docs/ranks.md has all of it.
"""
