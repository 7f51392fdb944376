"""Cases of `benchmark_kernels.py`: a file a family, and what families share."""
