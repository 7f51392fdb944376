"""Messages between the stages of a pipeline, and their process groups.

Hidden states are sent from stage to stage on the compute stream, through one group for each pair of
neighbours. Samples return from the last stage to all others on the copy stream, through a separate
group. So only one stream uses each group, in the order of the steps.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.communication.bootstrap import join_job
from megatron_async.models.parallel_state import COLLECTIVE_TIMEOUT_S, check_peers


class PipelineLinks:
    """The groups of one engine. torch makes groups with all processes of the job, so all of them
    make their engines at the same time, also those of other replicas.

    Args:
        pipeline: group of the stages, in their order.
        device: where the tensors are.
    """

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        mine = dist.get_process_group_ranks(pipeline)
        stage, self._count = mine.index(dist.get_rank()), len(mine)
        told = join_job().exchange("pipelines", msgspec.json.encode(mine).decode())
        all_pipelines = [msgspec.json.decode(text, type=list[int]) for text in told.values()]
        backend = "gloo" if device.type == "cpu" else "nccl"
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        for ranks in sorted(set(map(tuple, all_pipelines))):
            pairs = [dist.new_group(list(pair), timeout, backend) for pair in pairwise(ranks)]
            samples = dist.new_group(list(ranks), timeout, backend)
            if list(ranks) == mine:
                self._before = pairs[stage - 1] if stage > 0 else None
                self._after = pairs[stage] if stage + 1 < self._count else None
                self._samples = samples
        mine_alone = [self._before, self._after, self._samples]
        check_peers(join_job(), [group for group in mine_alone if group is not None])
        self._sent: list[dist.Work | None] = [None, None]
        # NCCL makes a communicator at first use, and the host waits for that: not in a step.
        word = torch.zeros(1, device=device)
        if self._before is not None:
            self.receive(word)
        if self._after is not None:
            self.send(word, 0)
            self.await_sent(0)
        self.share_samples(word)

    def receive(self, hidden: Tensor) -> None:
        """Fill `hidden` with the next message of the previous stage; on the compute stream."""
        dist.recv(hidden, group=self._before, group_src=0)

    def await_sent(self, place: int) -> None:
        """Let the compute stream wait until the message in this one of two places is sent."""
        work = self._sent[place]
        if work is not None:
            work.wait()
            self._sent[place] = None

    def send(self, hidden: Tensor, place: int) -> None:
        """Send to the next stage, which may still compute the previous step; the compute stream
        does not wait.

        Args:
            hidden: contiguous; must not change until `await_sent`.
            place: 0 or 1, in turn.
        """
        self._sent[place] = dist.isend(hidden, group=self._after, group_dst=1)

    def share_samples(self, words: Tensor) -> None:
        """From the last stage to all others, in place; work of the copy stream."""
        self.share(words, self._count - 1)

    def share(self, tensor: Tensor, stage: int) -> None:
        """From a stage to all others, in place; work of the copy stream."""
        dist.broadcast(tensor, group=self._samples, group_src=stage)
