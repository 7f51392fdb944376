"""Recordings, their replay, and serving in virtual time: the real engine on a clock.

docs/simulation.md is the guide. `parity/` compares an engine that computes with a reference.
"""
