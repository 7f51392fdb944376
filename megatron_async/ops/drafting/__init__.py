"""Kernels of drafters: n-gram lookup, the tokens of a draft model, storing drafts."""
