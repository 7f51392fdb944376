"""Products of a CPU: weights in blocks, of 8 and of 4 bits, and the threads that share them.

`integer_products.py` with `integer_tile.py`: the loops of 8 bits. `group_products.py` with
`group_tile.py` and `group_rows.py`: those of 4 bits in groups. `jobs.py`, `helpers.py` and
`atomics.py`: threads that stay awake between the products of a step, and what they tell each other.
"""
