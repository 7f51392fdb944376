"""Cases of `benchmark_kernels.py`: a file a family, and what families share. Arguments of ops are
those of their tests (`tests/unit_tests/ops/*/cases.py`)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # a script's own folder is there, `tests` is not
