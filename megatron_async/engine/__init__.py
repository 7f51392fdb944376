"""The life of requests, and the loop.

Which requests run in a step is decided in `planning/`; what the device does in a step is in
`step/`; engines of several ranks are kept together by `ranks/`.
"""

from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

__all__ = ["DynamicInferenceEngine"]
