"""Simulated fleets: replicas without a model behind the real dispatcher, on a virtual clock.

Capacity planning: `megatron-async simulate-fleet` (docs/simulation.md).
"""
