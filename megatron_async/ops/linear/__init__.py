"""Products of few rows, their activations, and norms."""
