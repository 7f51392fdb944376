"""Data-parallel serving: a coordinator, the replicas behind it, and clients in front of it."""
