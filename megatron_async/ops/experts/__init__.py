"""Routing tokens to experts, the experts' products, exchanges among ranks."""
