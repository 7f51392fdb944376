"""Proposing tokens without a model, and handing what was proposed on."""
