"""Sums, choices and lookups among tensor-parallel ranks."""
