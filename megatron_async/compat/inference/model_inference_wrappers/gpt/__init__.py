"""Wrappers of language models."""
