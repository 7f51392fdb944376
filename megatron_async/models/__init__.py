"""Layers with Megatron-Core's names over the engine's caches, and how ranks split them.

Reading weights from files is in `checkpoints/`, kernels are in `ops/`. docs/models.md is the guide.
"""
