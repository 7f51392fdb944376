"""What becomes of the steps in flight when a request that they serve ends.

`policy.py` has the default policy, "reconcile", and the other one, "rollback", under which the
steps are taken back. The two are compared in docs/bookkeeping.md.
"""
