"""The policy "rollback": steps in flight are taken back when a request ends unexpectedly.

The default policy, "reconcile", is in `engines/invalidation.py`. The two are compared in
docs/ends_and_stops.md.
"""
