"""The models' end of a step, at Megatron-Core's import path: tokens in, logits out.

Layers are in `models/`; sampling is in `text_generation_controllers/` and `ops/sampling/`.
"""
