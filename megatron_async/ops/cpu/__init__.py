"""Ops of a step on a CPU, compiled by Numba: what the families share.

In here: `row_kernels.py`, loops where torch would run a dozen small operations each; `rows.py`,
which rows they take; `step_kernels.py`, a step's first and last work; `layer_kernels.py`, all
layers of a dense decoder as one call; `threads.py`, threads that share rows; `float_math.py`, what
LLVM cannot take from the C library; `pointers.py`, one machine code for a loop, whatever calls it;
`compiler.py`, whether Numba is there, and what it keeps. The families
have rooms of their own (`ops/linear/cpu`, `ops/recurrent/cpu`, `ops/sampling/cpu` ...). Not in
here: products that torch's libraries do (oneDNN; fbgemm, in `ops/linear/cpu/eight_bit.py`), prefill
attention, prefill of recurrent layers, and the processing of logits.
"""
