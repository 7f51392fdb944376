"""The command line on several ranks: it is started on each, and speaks once."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.communication.own_folder import FOLDER_VARIABLE
from megatron_async.errors import JobFailed, RankLost

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_async.llm import LLM

CHARACTERS_AT_ONCE = 2**22
"""A value in torch's store has at most 8 MiB."""

STORE_TIMEOUT_S = 5.0
"""A rank that has an error to print does not wait longer for torchrun's store."""


def is_first_rank() -> bool:
    """Whether this is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def has_other_ranks() -> bool:
    """Whether torchrun started more than this process."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def quiet_ranks() -> None:
    """On several ranks: warnings are logged by rank 0, and an error alone names a lost rank."""
    if has_other_ranks():
        logging.getLogger("megatron_async.death_watch").setLevel(logging.CRITICAL)
        if not is_first_rank():
            logging.getLogger("megatron_async").setLevel(logging.ERROR)


def is_to_say(message: str, error: BaseException | None = None) -> bool:
    """Whether this rank is to print an error, rather than another that has the same to say.

    The first to ask is. What ranks say of another that was lost is the same, and nothing if that
    one has said why. Where ranks share neither a folder nor a store of torchrun's, every rank
    speaks for itself.

    Args:
        message: without anything that differs from rank to rank, unless `error` is a JobFailed.
        error: what is said; None: something wrong with the command.
    """
    if not has_other_ranks():
        return True
    is_first: Callable[[str], bool]
    try:
        me = os.environ["RANK"]
        if folder := os.environ.get(FOLDER_VARIABLE):
            is_first = partial(_is_first_link, Path(folder), me)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            is_first = partial(_is_first_key, _agents_store(), me)
        else:
            return True
    except (RuntimeError, ValueError, KeyError):  # torchrun ends, or is none
        return True
    about = "text " + sha256(message.encode()).hexdigest()
    if isinstance(error, RankLost) and error.ranks:
        about = f"rank {error.ranks[0]}"
    elif isinstance(error, JobFailed):
        about = type(error).__name__
    # Both calls: the second one tells the other ranks that this rank has reported itself.
    first = is_first(about)
    is_first(f"rank {me}")
    return first


def gather_replicas(llm: LLM, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the primary ranks have to say, in the order of replicas; every rank of the job calls.

    Args:
        document: what JSON can hold, and NumPy's arrays.

    Raises:
        RankLost: a rank has died, or has ended with an error.
    """
    if not has_other_ranks():
        return [dict(document)]
    from megatron_async.communication.bootstrap import join_job
    from megatron_async.communication.job import FINISH_TIMEOUT_S

    job = join_job()
    text = json.dumps(document, default=lambda v: v.tolist()) if llm.is_primary_rank else ""
    starts = range(0, len(text), CHARACTERS_AT_ONCE)
    parts = [text[start : start + CHARACTERS_AT_ONCE] for start in starts]
    counts = job.exchange("answers", str(len(parts)), timeout_s=FINISH_TIMEOUT_S)
    whole = {rank: "" for rank in counts}
    for number in range(max(map(int, counts.values()))):
        mine = parts[number] if number < len(parts) else ""
        for rank, part in job.exchange("parts of answers", mine).items():
            whole[rank] += part
    return [json.loads(text) for _, text in sorted(whole.items()) if text]


def end_together() -> None:
    """Wait for all ranks; torchrun kills those that still print when one has failed."""
    if has_other_ranks():
        from megatron_async.communication.bootstrap import join_job
        from megatron_async.communication.job import FINISH_TIMEOUT_S

        join_job().exchange("the end", "", timeout_s=FINISH_TIMEOUT_S)


def in_order_of_prompts(replicas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of all replicas, of which each took every n-th prompt."""
    shares = [replica["results"] for replica in replicas]
    if len(shares) == 1:
        return list(shares[0])
    longest = max(map(len, shares))
    return [
        share[turn] | {"replica": number}
        for turn in range(longest)
        for number, share in enumerate(shares)
        if turn < len(share)
    ]


def say_goodbye_with(error: BaseException) -> None:
    """Let the other ranks know at the end of this process that it failed, and why."""
    if has_other_ranks():
        # Where Python keeps an exception that nobody caught, and the job's goodbye looks for one.
        sys.last_exc = error


def _agents_store() -> dist.Store:
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megatron_async/said/{attempt}", store)


def _is_first_key(store: dist.Store, me: str, about: str) -> bool:
    return store.compare_set(about, "", me).decode() == me


def _is_first_link(folder: Path, me: str, about: str) -> bool:
    place = folder / f"said {about}"
    try:
        os.symlink(me, place)  # made at once with what it says
    except FileExistsError:
        return os.readlink(place) == me
    except OSError:  # the launcher of the ranks has ended
        return True
    return True
