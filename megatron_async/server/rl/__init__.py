"""Paths of other servers that trainers call: new weights, pauses, memory."""
