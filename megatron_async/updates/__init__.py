"""New weights for a model that serves: what waits for its step, and the copies that follow from it.

The engine decides when (`engine/updating.py`); names and pieces of weights are those of
`checkpoints/mapping.py`. docs/rl.md is the guide.
"""
