"""Which GPUs each replica of a service sees. Asked of the driver's files: this process has no
torch, and must not begin to use a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_async.errors import ConfigurationError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them."""
    listed = environment.get(VARIABLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return [str(number) for number in sorted(int(text) for text in numbers if text.isdigit())]


def share_gpus(
    gpus: list[str], replicas: int, ranks: int, device: str | None
) -> list[dict[str, str]]:
    """Variables of each replica's environment that say which GPUs are its own. `ranks`: GPUs that
    one replica needs. `device` is None where the command line names none: a GPU where there is one.

    Raises:
        ConfigurationError: several replicas would share a GPU, of which each wants most of the
            memory, or ranks have too few.
    """
    nothing: list[dict[str, str]] = [{} for _ in range(replicas)]
    is_alone = replicas == 1 and ranks == 1
    if device == "cpu" or is_alone or (device is None and not gpus):
        return nothing
    if device not in (None, "cuda"):
        raise ConfigurationError(
            f"--device {device} is one device, and {replicas} replicas of {ranks} ranks need one "
            "each: give --device cuda, and CUDA_VISIBLE_DEVICES to choose among GPUs."
        )
    if replicas * ranks > len(gpus):
        raise ConfigurationError(
            f"{replicas} replicas of {ranks} ranks need {replicas * ranks} GPUs, and there are "
            f"{len(gpus)}: give fewer replicas, or --device cpu."
        )
    return [
        {VARIABLE: ",".join(gpus[first : first + ranks])}
        for first in range(0, replicas * ranks, ranks)
    ]
