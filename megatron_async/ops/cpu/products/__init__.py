"""Products with 8-bit weights, and the threads that share them.

`integer_products.py` with `integer_tile.py`: the loops. `jobs.py`, `helpers.py` and `atomics.py`:
threads that stay awake between the products of a step, and what they tell each other.
"""
