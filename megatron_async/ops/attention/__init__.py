"""Attention over the paged cache, and what goes before it."""
