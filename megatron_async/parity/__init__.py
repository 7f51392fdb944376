"""Whether an engine's tokens are a reference's, and if not, whether two tokens were nearly tied.

`scripts/check_parity.py` is the command.
"""
