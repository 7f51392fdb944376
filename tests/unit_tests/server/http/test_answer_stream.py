"""`AnswerStream`: how an answer begins, without a task and without a socket."""

import asyncio

import numpy as np
import pytest

from megatron_async.server.answer_stream import AnswerStream, StreamHub
from megatron_async.server.http.answer_connection import AsgiConnection
from megatron_async.serving.messages import Ended
from tests.support.patience import PATIENCE_S

TOKEN = memoryview(np.array([7], np.int32))


class Connection:
    def __init__(self):
        self.is_gone, self.unread_bytes, self.chunks = False, 0, []

    def write_chunk(self, data):
        self.chunks.append(data)


class Formatter:
    def push(self, tokens, log_probs, text):
        if tokens == [666]:
            raise ValueError("no such token")
        return b"t" * len(tokens)

    def end(self, end):
        return b"end"


class Played:
    """A stream with a hub; `heads` are what its answer began with."""

    def __init__(self, choices=1):
        self.hub, self.connection = StreamHub(), Connection()
        self.heads, self.aborts = [], []
        self.stream = AnswerStream(self.hub, choices, lambda: self.aborts.append(1))
        self.feeds = self.stream.feeds

    def open(self):
        formatters = [Formatter() for _ in self.feeds]
        self.stream.open(self.connection, self.heads.append, formatters, lambda: b"first ")


def played(play):
    asyncio.run(play())


def test_the_first_token_is_in_the_write_that_begins_the_answer():
    """Before the flush returns: no task, and no turn of the loop, is in between. Break it: `begin`
    that leaves `_news` to `write`."""

    async def play():
        one = Played()
        one.open()
        one.feeds[0].tokens(TOKEN, None)
        assert one.heads == []  # all of a message first
        one.hub.flush()
        assert one.heads == [b"first t"]
        one.feeds[0].tokens(TOKEN, None)
        one.hub.flush()
        await asyncio.sleep(0)
        assert (one.heads, one.connection.chunks) == ([b"first t"], [b"t"])
        one.feeds[0].ended(Ended(0, "length"))
        one.hub.flush()
        assert one.stream.done.done()
        assert one.connection.chunks == [b"t", b"end"]

    played(play)


def test_choices_that_take_long_are_written_in_several_turns(monkeypatch):
    """Break it: `_news` that goes on; or `_go_on` that asks for no other turn."""
    monkeypatch.setattr("megatron_async.server.answer_stream.CHOICES_S", -1.0)

    async def play():
        one = Played(3)
        one.open()
        for feed in one.feeds:
            feed.tokens(TOKEN, None)
        one.hub.flush()
        for feed in one.feeds:
            feed.ended(Ended(0, "length"))
        assert (one.heads, one.connection.chunks) == ([b"first t"], [])
        await asyncio.wait_for(one.stream.done, PATIENCE_S)
        assert one.connection.chunks == [b"tend", b"tend", b"end"]

    played(play)


def test_what_comes_before_the_form_of_the_answer_is_there_waits_for_it():
    """Break it: `open` without its last lines."""

    async def play():
        one = Played()
        one.feeds[0].tokens(TOKEN, None)
        one.feeds[0].ended(Ended(0, "length"))
        one.hub.flush()
        assert one.heads == []
        one.open()
        assert one.heads == [b"first tend"]
        assert one.stream.done.done()

    played(play)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_answer_that_fails_at_once_is_not_begun(failing):
    """Also if no message brought the failure, so that nobody flushes; and if the other choice's
    token came with it. Break it: `_hear` that leaves failures to `begin`."""

    async def play():
        one = Played(2)
        one.open()
        one.feeds[1 - failing].tokens(TOKEN, None)
        one.feeds[failing].ended(Ended(0, "error", ("Overloaded", "too many")))
        await asyncio.wait_for(one.stream.done, PATIENCE_S)
        one.hub.flush()
        assert not one.stream.has_begun
        assert one.heads == []

    played(play)


def test_an_answer_that_cannot_be_begun_fails_alone():
    """Break it: `begin` without its `except`."""

    async def play():
        one, other = Played(), Played()
        other.stream._hub = one.hub
        one.open()
        other.open()
        one.feeds[0].tokens(memoryview(np.array([666], np.int32)), None)
        other.feeds[0].tokens(TOKEN, None)
        one.hub.flush()
        assert other.heads == [b"first t"]
        with pytest.raises(ValueError, match="no such token"):
            await one.stream.done

    played(play)


def test_an_answer_that_cannot_be_continued_fails_alone():
    """Also the streams behind it in the same pass are written. Break it: `write` that raises."""

    async def play():
        one, two = Played(), Played()
        two.stream._hub = one.hub
        for each in (one, two):
            each.open()
            each.feeds[0].tokens(TOKEN, None)
        one.hub.flush()
        await asyncio.sleep(0)
        one.feeds[0].tokens(memoryview(np.array([666], np.int32)), None)
        two.feeds[0].ended(Ended(0, "length"))
        one.hub.flush()
        assert isinstance(one.stream.done.exception(), ValueError)
        assert one.aborts == [1]
        assert two.stream.done.result() is None
        assert two.connection.chunks == [b"end"]

    played(play)


def test_who_is_gone_before_the_first_token_is_given_up():
    """Break it: `begin` that does not ask."""

    async def play():
        one = Played()
        one.open()
        one.connection.is_gone = True
        one.feeds[0].tokens(TOKEN, None)
        one.hub.flush()
        assert one.stream.done.done()
        assert one.aborts == [1]
        assert one.heads == []

    played(play)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_another_server_gets_the_beginning_first(version):
    """Break it: `_write` without the start; or `begin_events` that is the same for HTTP/1.0."""

    async def play():
        sent = []

        async def send(message):
            await asyncio.sleep(0)
            sent.append(message)

        connection = AsgiConnection(asyncio.Future, send)
        connection.begin_events({"http_version": version}, [(b"a", b"b")], b"1")
        connection.write_chunk(b"2")
        await connection.send({"type": "http.response.body", "body": b""})
        start, *parts = sent
        closes = [(b"connection", b"close")] if version == "1.0" else []
        assert start["headers"] == [(b"a", b"b"), *closes]
        assert b"".join(part["body"] for part in parts) == b"12"
        assert "more_body" not in parts[-1]

    played(play)
