"""`StepRouting`: the experts that a pass's tokens go to, layer by layer."""

from __future__ import annotations

from torch import Tensor

from megatron_async.ops.experts.expert_routing import Routing


class StepRouting:
    """What the layers with experts choose in one pass over tokens, and what they have to.

    Args:
        forced: int32 `[layers, tokens, topk]` on the device: ids of the experts that tokens go to;
            -1 where a token goes to those that the router prefers. None: everywhere.

    Attributes:
        experts: int32 `[tokens or more, topk]` of each layer that has run, in their order. With
            sequence parallelism the tokens are the group's, and padded.
    """

    def __init__(self, forced: Tensor | None = None) -> None:
        self._forced = forced
        self.experts: list[Tensor] = []

    @property
    def forced(self) -> Tensor | None:
        """`forced` of the layer that runs next, `[tokens, topk]`."""
        return None if self._forced is None else self._forced[len(self.experts)]

    def note(self, routing: Routing) -> None:
        """A layer has launched the kernels that write `routing`."""
        self.experts.append(routing.experts)
