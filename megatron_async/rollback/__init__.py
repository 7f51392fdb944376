"""What becomes of the steps in flight when a request that they serve ends.

`invalidation.py` has the default policy, "reconcile", and `policy.py` the other one, "rollback",
under which the steps are taken back. The two are compared in docs/bookkeeping.md.
"""
