"""Ops of the hot path: for each a Triton kernel and its plain-torch reference, side by side.

`kernels.py` chooses between the two by device. No op waits for the device or reads a plan: what
shapes a tensor comes from `BatchDimensions`. docs/captured_steps.md has a table of ops.
"""
