"""Ranks that hold one model between them: the leader's log, followers, consensus of experts.

Messages between hosts are in `communication/`, what pipeline stages exchange in
`pipeline/`, sums of tensors in `ops/ranks/`. docs/many_ranks.md is the guide.
"""
