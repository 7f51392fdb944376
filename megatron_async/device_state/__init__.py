"""The device's side of a plan: its bookkeeping, per-slot state and KV cache."""
