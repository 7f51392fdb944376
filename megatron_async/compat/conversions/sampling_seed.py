"""`SamplingSeed`: what remains of Megatron's random number generator."""

from __future__ import annotations

from megatron_async.config import InferenceConfig


class SamplingSeed:
    """Megatron's `controller.sampling_rng` for scripts that seed it.

    Random numbers here follow from each request's seed and the place of the token, and no generator
    has a state. A request without a seed of its own takes the engine's, mixed with its id.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: InferenceConfig) -> None:
        self._settings = settings

    def manual_seed(self, seed: int) -> SamplingSeed:
        """Seed requests that are added from now on.

        Returns:
            itself, as torch's generators do.
        """
        self._settings.inference_sampling_seed = int(seed)
        return self

    def initial_seed(self) -> int:
        """The present seed."""
        return self._settings.inference_sampling_seed
