"""The report tool behind `megatron-async profile`: workloads, gaps on the device, a page.

What an engine records while it serves (ranges, timelines, metrics) is in `observe/`.
"""
