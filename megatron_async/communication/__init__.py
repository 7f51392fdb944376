"""How the host processes of a job find each other, communicate, and notice each other's death.

This folder sends only small messages between host threads. Tensors are sent by NCCL or gloo, in
launched work (`ops/ranks/`, `step/`).
"""
