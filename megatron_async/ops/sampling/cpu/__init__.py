"""Tokens and log probs without a sort."""
