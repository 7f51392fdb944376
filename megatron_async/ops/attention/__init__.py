"""Attention over the paged cache, and the kernels before it: rotary embedding and KV append."""
