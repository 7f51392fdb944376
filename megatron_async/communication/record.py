"""`RankRecord`: the description of a rank that all others read when a job starts."""

from __future__ import annotations

import msgspec

from megatron_async.errors import ConfigurationError


class RankRecord(msgspec.Struct, frozen=True):
    """A rank, as all others know it.

    Attributes:
        rank: of all ranks of the job.
        world_size: ranks that it believes to be in the job.
        local_rank: of the ranks of its host.
        host: name of its host.
        host_identity: see `host.host_identity`.
        pid: its process id, there.
        address: IP address of its host, on the route to the master.
        versions: of what must be the same everywhere.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    host_identity: str
    pid: int
    address: str
    versions: dict[str, str] = {}

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def on_host_of(self, other: RankRecord) -> bool:
        """Whether the two share a host."""
        return self.host_identity == other.host_identity


def encode_record(record: RankRecord) -> str:
    """For a store, whose values are strings."""
    return msgspec.json.encode(record).decode()


def decode_record(text: str | bytes) -> RankRecord:
    """The inverse of `encode_record`.

    Raises:
        ConfigurationError: the text is no record.
    """
    try:
        return msgspec.json.decode(text, type=RankRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The store in which the ranks of this job meet has something else in the place of a "
            f"rank's record ({error}): another program uses it, or another version of this one. "
            "Set another MASTER_PORT."
        ) from error
