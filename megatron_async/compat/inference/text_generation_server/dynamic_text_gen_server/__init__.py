"""The HTTP server of the dynamic engine, under Megatron's path."""

from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server.text_generation_server import (  # noqa: E501
    start_text_gen_server,
    stop_text_gen_server,
)

__all__ = ["start_text_gen_server", "stop_text_gen_server"]
