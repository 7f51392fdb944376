"""Experts on a CPU whose weights are kept as the blocks of a GGUF file."""
