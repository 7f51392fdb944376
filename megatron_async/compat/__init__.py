"""What exists for Megatron's sake alone: aliases, conversions, the adapter of models, the hook.

`megatron_async.compat.inference` has the modules and names of `megatron.core.inference`; what this
project has no part for is Megatron's own. A script changes that one word in its imports, or runs
unmodified: `python -m megatron_async.compat SCRIPT ARGS`, or `install()` in a program's first
lines. docs/megatron.md is the manual.
"""

from __future__ import annotations

from megatron_async.compat.import_hook import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
