"""Models that Megatron built: how they are read, checked and served with their own weights."""

from megatron_async.compat.models.served_model import ServedModel, serve_model
from megatron_async.compat.models.serving_config import serving_config

__all__ = ["ServedModel", "serve_model", "serving_config"]
