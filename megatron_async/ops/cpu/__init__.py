"""Ops of a step on a CPU, compiled by Numba.

In here: `row_kernels.py` and `attention_kernels.py`, loops where torch would run a dozen small
operations each; `rows.py` and `host_attention.py`, these ops with the signatures of their
references; `recurrent_loops.py`, `mamba_kernels.py`, `delta_kernels.py` and `flush_kernels.py`,
decode rows of recurrent layers, with `host_recurrent.py` and `host_flush.py`;
`sampling_kernels.py`, with `noise_kernels.py`, `ranking_kernels.py` and
`log_prob_kernels.py`, tokens without a sort, and `host_sampling.py`, the same with the signatures
of the references; `step_kernels.py`, a step's first and last work; `integer_products.py` with
`integer_tile.py`, products with 8-bit weights; `layer_kernels.py`, all layers of a dense decoder as
one call; `jobs.py`, `helpers.py` and `atomics.py`, the threads that share products and attention;
`threads.py`, those that share rows; `float_math.py`, what LLVM cannot take from the C library;
`pointers.py`, one machine code for a loop, whoever calls it; `compiler.py`, whether Numba is there,
and what it keeps. Not in here: all other products of matrices, which torch's libraries do (oneDNN;
fbgemm, in `ops/linear/eight_bit.py`), prefill attention, prefill of recurrent layers, and the
processing of logits.
"""
