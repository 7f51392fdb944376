"""The life of requests, and the loop.

Who runs in a step is decided in `contexts/`; what the device does in a step is in
`text_generation_controllers/`; engines of several ranks are kept together by `ranks/`.
"""

from megatron_async.engines.dynamic_engine import DynamicInferenceEngine

__all__ = ["DynamicInferenceEngine"]
