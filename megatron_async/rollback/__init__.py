"""The policy "rollback": steps in flight are taken back when a request ends."""
