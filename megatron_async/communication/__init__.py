"""How the CPUs of a job's ranks find each other, talk, and notice each other's death.

Only small messages between host threads travel here. Tensors travel by NCCL or gloo, in launched
work (`ops/ranks/`, `pipeline/`).
"""
