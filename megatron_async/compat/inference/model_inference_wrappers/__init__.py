"""Wrappers of models, under the paths of `megatron.core.inference.model_inference_wrappers`."""
