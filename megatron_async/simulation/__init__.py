"""Recordings, their replay, and serving in virtual time: the real engine on a clock.

Simulated fleets are in `fleets/`. docs/simulation.md is the guide.
"""
