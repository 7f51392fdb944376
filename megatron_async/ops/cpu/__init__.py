"""Ops of a step on a CPU, compiled by Numba: what the families share.

The families have rooms of their own (`ops/linear/cpu`, `ops/recurrent/cpu`, `ops/sampling/cpu`
...). Torch does: products by oneDNN, or by fbgemm (`ops/linear/cpu/eight_bit.py`), prefill
attention, prefill of recurrent layers, and the processing of logits.
"""
