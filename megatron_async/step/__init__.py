"""One step's work on the device: forward, sampling, drafts, captured graphs, exchanges between
pipeline stages, the copy of samples.

Which requests run in a step is decided in `planning/`, how far the loop runs ahead in `engine/`.
Layers are in `models/`, kernels in `ops/`. docs/gpus.md and docs/ranks.md are the guides.
"""
