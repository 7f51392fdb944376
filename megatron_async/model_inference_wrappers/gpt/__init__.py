"""The wrapper around `GPTModel` and `HybridModel`, at Megatron-Core's import path."""
