"""A reader of a client, for requests whose texts nobody makes."""

import asyncio

from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs, TokenReader


class KeepingReader(TokenReader):
    """Keeps the tokens and the end that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[int] = []
        self.end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        assert not self.end.done()
        self.got += tokens.tolist()

    def text(self, text: str) -> None:
        raise AssertionError("nobody makes texts here")

    def ended(self, end: Ended) -> None:
        self.end.set_result(end)
