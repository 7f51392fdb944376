"""Ops of a step on a CPU, compiled by Numba.

In here: `row_kernels.py` and `attention_kernels.py`, loops where torch would run a dozen small
operations each; `rows.py` and `host_attention.py`, these ops with the signatures of their
references; `integer_products.py` with `integer_tile.py`, products with 8-bit weights on a CPU
without VNNI; `helpers.py` and `atomics.py`, the threads that share such a product; `compiler.py`,
whether Numba is there and which functions it may reorder. Not in here: all other products of
matrices, which torch's libraries do (oneDNN; fbgemm, in `ops/linear/eight_bit.py`), prefill
attention, and sampling.
"""
