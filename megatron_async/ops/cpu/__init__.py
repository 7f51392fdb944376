"""Ops of a step on a CPU, compiled by Numba: what the families share.

In here: `row_kernels.py`, loops where torch would run a dozen small operations each; `rows.py`,
which rows they take; `step_kernels.py`, a step's first and last work; `layer_kernels.py`, all
layers of a dense decoder as one call; `threads.py`, threads that share rows; `float_math.py`, what
LLVM cannot take from the C library; `pointers.py`, one machine code for a loop, whatever calls it;
`compiler.py`, whether Numba is there, and what it keeps. In a room of their own: `products`;
other families have theirs (`ops/recurrent/cpu`, `ops/sampling/cpu` ...). Not in here: all
other products of matrices, which torch's libraries do (oneDNN; fbgemm, in
`ops/linear/eight_bit.py`), prefill attention, prefill of recurrent layers, and the processing of
logits.
"""
