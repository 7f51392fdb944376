"""Tokens and log probs without a sort.

`host_sampling.py`: the ops, with the signatures of `ops/sampling`. `sampling_kernels.py`: the loop
of a row; `ranking_kernels.py`: what filters drop; `noise_kernels.py`: Philox and Gumbel noise;
`log_prob_kernels.py`: log probs and the likeliest tokens.
"""
