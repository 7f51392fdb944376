"""Data-parallel serving: a coordinator, the replicas behind it, and Python clients.

HTTP is in `server/`, replicas under Ray Serve are in `ray/`. docs/serving.md is the guide.
"""
