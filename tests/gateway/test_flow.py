"""Plain tokens take the short way from socket to socket; nobody can tell by what comes out."""

import itertools
import random

import pytest

from backends.upstream import Timeouts, UpstreamPool, _Connection
from backends.wire.http import CHUNK_HEADS, ResponseReader
from backends.wire.openai import RequestParser
from domain.errors import BackendTimeout
from domain.outcome import Cause
from gateway.relay import Plane
from gateway.server import ClientConnection, GatewayServer
from tests.fakes.dispatcher import LeastRequests
from tests.fakes.engine import DONE, LAST_CHUNK, ROLE, SSE_HEAD, STOP, USAGE, chunk, event, word

BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
WORDS = [word(f"w{i} ") for i in range(6)]


class Timers:
    """A loop that only notes its timers."""

    def __init__(self):
        self.calls = []

    def call_later(self, delay, call):
        self.calls.append((delay, call))
        return self

    def cancel(self):
        """The test fires them itself."""


class Wire:
    """A transport that keeps what is written."""

    def __init__(self):
        self.data = b""
        self.aborted = False

    def write(self, data):
        assert not self.aborted
        self.data += data

    def abort(self):
        self.aborted = True

    def close(self):
        self.aborted = True

    def is_closing(self):
        return self.aborted

    def set_write_buffer_limits(self, high):
        pass

    def get_write_buffer_size(self):
        return 0

    def get_extra_info(self, name):
        return None


class Line:
    """One client, one engine, the relay between them, and a clock that stands still."""

    def __init__(self, timeouts=None):
        self.now = 100.0
        self.timers = Timers()
        pool = UpstreamPool("http://127.0.0.1:1", clock=lambda: self.now)
        pool._loop = self.timers
        self.engine, self.engine_wire = _Connection(pool), Wire()
        self.engine.connection_made(self.engine_wire)
        self.engine.idle_since = self.now
        pool._idle.append(self.engine)
        self.dispatcher = LeastRequests([pool], timeouts=timeouts)
        plane = Plane(dispatcher=self.dispatcher, parser=RequestParser(), clock=lambda: self.now)
        self.client, self.client_wire = ClientConnection(GatewayServer(plane, None)), Wire()
        self.client.connection_made(self.client_wire)
        self.client.data_received(REQUEST)

    def receive(self, *blocks):
        """What the engine sent, read in these blocks."""
        for block in blocks:
            self.engine.data_received(block)

    @property
    def body(self):
        """What the client has read, framing removed; the framing must be whole."""
        reader = ResponseReader(1 << 16)
        body = reader.feed(self.client_wire.data)
        assert reader.head.status == 200
        return body

    @property
    def usage(self):
        """What the dispatcher was told of the only attempt."""
        (call,) = [call for call in self.dispatcher.calls if call[0] == "ended"]
        return call[2].usage


def through(wire, cuts):
    """The client's body and the usage when the engine's answer is read in pieces."""
    line = Line()
    places = [0, *sorted(cuts), len(wire)]
    line.receive(*(wire[a:b] for a, b in itertools.pairwise(places) if b > a))
    return line.body, line.usage


def test_tokens_go_on_as_they_came():
    """Framing included, byte for byte, counted one by one."""
    line = Line()
    line.receive(SSE_HEAD + chunk(ROLE), chunk(WORDS[0]))
    assert line.engine.express is not None
    before = len(line.client_wire.data)
    for i, text in enumerate(WORDS[1:]):
        line.receive(chunk(text))
        assert line.client_wire.data[before:] == chunk(text)
        assert line.engine.express is not None
        before = len(line.client_wire.data)
        (relay,) = [call[1] for call in line.dispatcher.calls if call[0] == "open"]
        assert relay.tokens(1) == i + 2
    line.receive(chunk(STOP), chunk(DONE) + LAST_CHUNK)
    assert line.body == b"".join([ROLE, *WORDS, STOP, DONE])
    assert line.usage.completion == len(WORDS)
    assert line.engine.express is None


ODD = [
    chunk(event(choices=[{"delta": {"content": "a"}}], usage={"completion_tokens": 1})),
    chunk(word("")),
    chunk(WORDS[0] + WORDS[1]),
    chunk(WORDS[0][:9]) + chunk(WORDS[0][9:]),
    chunk(WORDS[0].replace(b"\n", b"\r\n")),
    chunk(WORDS[0] + b"\n"),
    chunk(b": still here\n\n"),
    b"%X\r\n%b\r\n" % (len(WORDS[2]), WORDS[2]),
    b"%x;a=b\r\n%b\r\n" % (len(WORDS[2]), WORDS[2]),
    b"000%x\r\n%b\r\n" % (len(WORDS[2]), WORDS[2]),
    chunk(word("y" * 5000)),
    chunk(word('"content":"" \\n\\n \r\n 5\r\nab')),
    chunk(event(choices=[{"delta": {"reasoning_content": "hm"}}])),
]
LAST_WORD = chunk(word("the end", "stop"))


@pytest.mark.parametrize("odd", [*ODD, LAST_WORD], ids=range(len(ODD) + 1))
def test_no_cut_changes_what_the_client_reads(odd):
    """Cut at every frame, and once more at every few bytes and around every frame."""
    tokens = b"".join(map(chunk, WORDS[:2]))
    wire = SSE_HEAD + chunk(ROLE) + tokens + odd + tokens
    wire += chunk(STOP) + chunk(USAGE) + chunk(DONE) + LAST_CHUNK
    whole = through(wire, [])
    start = len(SSE_HEAD + chunk(ROLE))
    frames = [start, start + len(chunk(WORDS[0])), start + len(tokens)]
    frames += [start + len(tokens + odd), start + len(tokens + odd + chunk(WORDS[0]))]
    assert through(wire, frames) == whole
    near = {frame + step for frame in frames for step in range(-6, 12)}
    for cut in sorted(near | set(range(start, len(wire), 41))):
        assert through(wire, [*frames, cut]) == whole


def test_random_streams_in_random_pieces():
    """Any mixture, cut at frames and anywhere else."""
    chance = random.Random(7)
    for _ in range(200):
        frames = [chance.choice(ODD + [chunk(w) for w in WORDS]) for _ in range(12)]
        frames += [chunk(STOP), chunk(USAGE), chunk(DONE) + LAST_CHUNK]
        wire, cuts = SSE_HEAD + chunk(ROLE), []
        for frame in frames:
            cuts += [len(wire)] if chance.random() < 0.8 else []
            wire += frame
        cuts += [chance.randrange(len(wire)) for _ in range(chance.randrange(3))]
        assert through(wire, cuts) == through(wire, [])


@pytest.mark.parametrize("more", [b"", chunk(STOP), chunk(DONE), chunk(STOP) + chunk(DONE)])
def test_a_last_word_that_says_why_it_ends_is_the_end(more):
    """Whole without `[DONE]`, and the reason is told once."""
    frames = [*map(chunk, WORDS), LAST_WORD]
    for blocks in (frames, [b"".join(frames[:3]), b"".join(frames[3:])]):
        line = Line()
        line.receive(SSE_HEAD + chunk(ROLE), *blocks, *([more] if more else []), LAST_CHUNK)
        (call,) = [call for call in line.dispatcher.calls if call[0] == "ended"]
        assert call[2].cause is Cause.FINISHED
        assert line.body.count(b'"stop"') == 1
        assert line.body.endswith(DONE)
        assert line.usage.completion == len(WORDS) + 1


def test_a_chunk_whose_size_lies_is_no_short_way():
    """The parser, not the short way, says what is wrong with it: nothing of it is passed on."""
    line = Line()
    line.receive(SSE_HEAD + chunk(ROLE), chunk(WORDS[0]))
    good = line.client_wire.data
    lying = b"%x\r\n%b\r\n" % (len(WORDS[1]) - 1, WORDS[1])
    line.receive(lying)
    assert WORDS[1] not in line.client_wire.data[len(good) :]
    (call,) = [call for call in line.dispatcher.calls if call[0] == "ended"]
    assert call[2].error is not None


def test_every_size_of_a_chunk_has_one_head():
    """The table agrees with the framing that engines and our server write."""
    for size in (1, 9, 15, 16, 17, 255, 256, 4000):
        frame = chunk(b"x" * size)
        assert frame.startswith(CHUNK_HEADS[len(frame)])
        assert not frame.startswith(CHUNK_HEADS[len(frame) - 1])
        assert not frame.startswith(CHUNK_HEADS[len(frame) + 1])


def test_the_short_way_counts_as_progress():
    """A stream lives as long as tokens come, and ends when they stop for too long."""
    line = Line(Timeouts(between_tokens=60.0, total=None))
    line.receive(SSE_HEAD + chunk(ROLE), chunk(WORDS[0]))
    _, expire = line.timers.calls[0]
    for text in WORDS[1:]:
        line.now += 50.0
        line.receive(chunk(text))
        expire()
        assert not line.engine_wire.aborted
    line.now += 61.0
    expire()
    assert line.engine_wire.aborted
    (call,) = [call for call in line.dispatcher.calls if call[0] == "ended"]
    assert isinstance(call[2].error, BackendTimeout)
    assert call[2].usage.completion == len(WORDS)


def test_a_client_that_leaves_ends_the_short_way():
    """Nothing is written to a connection that is gone."""
    line = Line()
    line.receive(SSE_HEAD + chunk(ROLE), chunk(WORDS[0]), chunk(WORDS[1]))
    line.client.connection_lost(None)
    assert line.engine_wire.aborted
    assert line.engine.express is None
