"""The module tree of `megatron.core.inference`, with this project's engine in it.

Modules and names that have no file or no name here are Megatron's own, the very same objects: see
`megatron_async.compat.mirror`.
"""

from __future__ import annotations

from megatron_async.compat.mirror import add_finder, names_of_megatron

add_finder()
__getattr__ = names_of_megatron(__name__)
