"""Ranks that hold one model between them: leader, follower, consensus."""
