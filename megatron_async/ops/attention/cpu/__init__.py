"""Attention over the paged cache by loops that Numba compiles for a CPU, and the loop before it,
which rotates heads and appends keys and values."""
