"""From Megatron's data classes to ours and back."""
