"""The garbage collector beside an engine that serves."""

import gc
import weakref

from megatron_async.serving.replica import frozen_heap


class Node:
    """May lie in a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_not_walked_and_what_comes_is_freed() -> None:
    before = [[] for _ in range(1000)]
    with frozen_heap():
        assert len(gc.get_objects(generation=2)) < len(before)
        node = Node()
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None
    assert any(found is before for found in gc.get_objects(generation=2))
