"""Replicas that another manager (Ray Serve) starts and ends, and the HTTP ingress in front of them.

A fleet stands above `serving/` and `server/`: a replica is an engine as in `serving/`, without a
coordinator, and the ingress answers with the HTTP application of `server/`. `app.py`, `fleet.py`,
`ranks.py` and `router.py` are all that imports Ray.
"""
