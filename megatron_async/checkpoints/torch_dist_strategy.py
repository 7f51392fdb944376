"""How Megatron's `dist_checkpointing.save` writes files on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


class SynchronousSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` format, written by torch's plain writer.

    Megatron's own strategy writes through its asynchronous writer even when asked to wait, and that
    one needs CUDA. Two helpers are private to Megatron-Core 0.19; the pinned version has them.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Write all shards of this rank; collective over all ranks."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        dcp.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
        )
