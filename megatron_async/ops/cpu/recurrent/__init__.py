"""Decode rows of Mamba-2 and Gated DeltaNet layers.

`host_recurrent.py` and `host_flush.py`: the ops, with the signatures of `ops/recurrent`.
`mamba_kernels.py`, `delta_kernels.py` and `flush_kernels.py`: the loops; `recurrent_loops.py`: what
they share.
"""
