"""End connections to a silent host, by the kernel's TCP keepalive instead of libzmq's heartbeats.

ZMTP's own heartbeats (ZMQ_HEARTBEAT_IVL) are set on no socket of ours, because they can abort the
process: "Assertion failed: !_io_error (src/stream_engine_base.cpp:310)" in libzmq 4.3.5 (its issues
#3937, #4364 and #4767). An engine whose pipe takes no message stops its input; when the peer then
closes the connection, it removes itself from the poll set (_io_error) and waits. Of all that can
call its output in this state, everything looks at _io_error first except for the heartbeat's timer.
A limitless queue (RCVHWM 0) does not help: a pipe that is being closed takes no message either, as
when two ranks leave at once and the goodbye of one meets the end of the other. Without heartbeats
there is no timer, and nothing else leads there.
"""

from __future__ import annotations

import math
from typing import Any

import zmq

PROBES = 4
"""Number of the kernel's probes within the silence."""


def end_silent_connections(socket: zmq.Socket[Any], silence_s: float) -> None:
    """Let TCP connections that a socket makes or accepts from now on end after a silence.

    The kernel of the peer's host answers the probes, so a peer process that is busy or stopped is
    not silent. Two kinds of peers are: a host that is down or cut off, and a process whose receive
    buffers stay full for `silence_s` (libzmq's thread empties them where RCVHWM is 0 or somebody
    reads). Probes of an idle connection also keep firewalls from dropping it. Other transports stay
    within a host and need no probes.

    Args:
        socket: not bound or connected yet.
        silence_s: seconds without any answer after which a connection ends, up to a second more;
            at least 1.
    """
    interval_s = max(1, math.floor(silence_s / PROBES))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, max(1, math.ceil(silence_s / interval_s) - 1))
    # While data is on the way nobody asks: then this counts (Linux's TCP_USER_TIMEOUT).
    socket.setsockopt(zmq.TCP_MAXRT, round(1000 * silence_s))
