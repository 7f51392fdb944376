"""HTTP servers under Megatron's path; the dynamic engine's is this project's."""
