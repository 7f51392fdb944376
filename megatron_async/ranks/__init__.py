"""The ranks of one model: the leader's log, followers, and agreement of ranks that share experts.

Messages between hosts are in `communication/`, exchanges of pipeline stages in `step/`, sums of
tensors in `ops/ranks/`. docs/ranks.md is the guide.
"""
