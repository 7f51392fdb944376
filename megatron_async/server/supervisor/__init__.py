"""`megatron-async serve`: one process that starts, watches and ends all others, without torch."""
