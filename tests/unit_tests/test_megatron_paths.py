"""A script written for Megatron-Core finds the same names at the same paths in `compat`."""

from importlib import import_module

import pytest

PATHS = {
    "config": ["InferenceConfig"],
    "sampling_params": ["SamplingParams"],
    "inference_request": [
        "DynamicInferenceEvent",
        "DynamicInferenceEventType",
        "DynamicInferenceRequest",
        "Status",
    ],
    "contexts.dynamic_context": ["DynamicInferenceContext"],
    "engines.dynamic_engine": ["DynamicInferenceEngine"],
    "text_generation_controllers.text_generation_controller": ["TextGenerationController"],
    "model_inference_wrappers.gpt.gpt_inference_wrapper": ["GPTInferenceWrapper"],
}


@pytest.mark.parametrize(("path", "name"), [(p, n) for p, names in PATHS.items() for n in names])
def test_names_are_where_megatron_has_them(path, name):
    assert hasattr(import_module(f"megatron.core.inference.{path}"), name)
    assert hasattr(import_module(f"megatron_async.compat.inference.{path}"), name)
