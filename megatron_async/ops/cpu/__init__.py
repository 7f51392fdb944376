"""Ops of a step on a CPU that torch would make of a dozen small operations each, compiled by Numba.

In here: `row_kernels.py` and `attention_kernels.py`, the loops; `rows.py` and `host_attention.py`,
the ops with the signatures of their references; `compiler.py`, whether Numba is there and which
functions it may reorder. Not in here: products of matrices, which torch's libraries do
(`ops/linear/eight_bit.py`, oneDNN), prefill attention, and sampling.
"""
