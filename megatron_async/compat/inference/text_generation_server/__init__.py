"""HTTP servers under Megatron's path; that of the dynamic engine is this project's."""
