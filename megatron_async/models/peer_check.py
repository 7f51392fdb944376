"""`check_peers`: whether gloo's connections lead to the ranks of this job.

A gloo pair takes the first process that connects to its port and says a small number
(`gloo/transport/tcp/listener.cc`), so another process of the host could take a rank's place while a
job starts. Later connections are not taken.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b

import torch
import torch.distributed as dist

from megatron_async.communication.job import Job
from megatron_async.errors import ConfigurationError

WORD_BYTES = 16


def check_peers(job: Job, groups: Iterable[dist.ProcessGroup]) -> None:
    """Let every two ranks of each group tell each other words that follow from a secret in the
    job's store. All ranks of the job call this, with the groups that they have, in the order in
    which they were made.

    Raises:
        ConfigurationError: a connection leads to somebody else.
        RankLost: a rank is gone.
    """
    secret = job.exchange("the secret of peers", secrets.token_hex(32))[0].encode()
    for group in groups:
        if group.size() == 1 or "gloo" not in dist.get_backend_config(group):
            continue
        ranks = dist.get_process_group_ranks(group)
        mine = torch.tensor([_word(secret, group, job.rank, rank) for rank in ranks])
        told = torch.zeros_like(mine)
        failure: RuntimeError | None = None
        try:
            dist.all_to_all_single(told, mine, group=group)
        except RuntimeError as error:
            job.watch.check(ranks, "the check of gloo's connections")
            failure = error
        expected = [_word(secret, group, rank, job.rank) for rank in ranks]
        words = told.tolist()  # sync-ok: at the start, on the host
        strangers = [rank for rank, word, due in zip(ranks, words, expected) if word != due]
        if strangers:
            raise ConfigurationError(
                f"A connection of rank {job.rank} by gloo does not lead to "
                f"{job.watch.describe(strangers)}: another process, of this host or of the "
                "network, has connected in its place. Start the job again, and see what else runs "
                "there (docs/ranks.md)."
            ) from failure


def _word(secret: bytes, group: dist.ProcessGroup, teller: int, hearer: int) -> list[int]:
    about = f"{group.group_name} {teller} {hearer}".encode()
    return list(blake2b(about, key=secret, digest_size=WORD_BYTES).digest())
