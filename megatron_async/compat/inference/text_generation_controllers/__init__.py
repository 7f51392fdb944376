"""Controllers under Megatron's path."""
