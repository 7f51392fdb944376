"""Ops of a step on a CPU, compiled by Numba.

In here: `row_kernels.py` and `attention_kernels.py`, loops where torch would run a dozen small
operations each; `rows.py` and `host_attention.py`, these ops with the signatures of their
references; `integer_products.py` with `integer_tile.py`, products with 8-bit weights;
`layer_kernels.py`, all layers of a dense decoder as one call; `jobs.py`, `helpers.py` and
`atomics.py`, the threads that share products and attention; `pointers.py`, one machine code for a
loop, whoever calls it; `compiler.py`, whether Numba is there, and what it keeps. Not in here: all
other products of matrices, which torch's libraries do (oneDNN; fbgemm, in
`ops/linear/eight_bit.py`), prefill attention, and sampling.
"""
