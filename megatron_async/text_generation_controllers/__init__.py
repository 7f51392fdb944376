"""One step's work on the device: forward, sampling, drafts, captured graphs, the copy of samples.

Who runs in a step is decided in `contexts/`, how far the loop runs ahead in `engines/`.
"""
