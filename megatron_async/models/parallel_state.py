"""Process groups: every Megatron-Core module asks for them, also when there is one process."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


def ensure_process_groups() -> ProcessGroupCollection:
    """Initialise torch.distributed and Megatron's groups if nobody has, and return the groups.

    Under `torchrun` the environment says who we are; alone, a world of one is made in memory (no
    port, no file). Groups that a user set up before are taken as they are.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        else:
            # A world of one never communicates; gloo is the backend that costs nothing.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return ProcessGroupCollection.use_mpu_process_groups()


def _leave() -> None:
    """Undo `ensure_process_groups` at exit, unless the user has."""
    if dist.is_initialized():
        dist.destroy_process_group()
