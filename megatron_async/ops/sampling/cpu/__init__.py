"""Tokens and log probs without a sort.

`host_sampling.py`: the ops, with the signatures of `ops/sampling`. `sampling_kernels.py`: the loops
of a row; `ranking_kernels.py`: what filters drop; `noise_kernels.py`: Philox and Gumbel noise.
"""
