"""How the CPUs of a job's ranks find each other, talk, and notice each other's death.

Tensors travel by NCCL or gloo, in launched work; here travel small messages between host threads.
"""
