"""Fuzz of everything that reads bytes from outside: no crash, no hang, no byte changed.

    python -m tests.benchmarks.fuzz --inputs 1000000 [--seed 1] [--seconds 600]

Each input is a valid message damaged by a few mutations (or left whole, or pure noise), cut into
random pieces. What is checked, by target:

  request   the parser accepts only what the standard library reads as the same JSON, and the splice
            changes the model and `include_usage` and no other byte
  sse       what leaves the meter is what entered it, less whole usage and repeated finish events;
            the count equals that of a slow decoder where the input is valid
  response  a whole body comes out as it was framed; damage is a BackendProtocolError, never more
  server    the client-facing connection answers, closes or waits, and never raises

An input that takes longer than a second counts as a hang. Prints inputs per target and the seed of
the first failure; exit code 1 if there is one.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import sys
import time

from backends.wire.http import ResponseReader
from backends.wire.openai import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, RequestParser, splice
from backends.wire.sse import CHAT_CONTENT, StreamMeter
from domain.errors import BackendProtocolError, MalformedBody
from gateway.relay import Plane
from gateway.server import ClientConnection, GatewayServer, ServerLimits

HANG_SECONDS = 1.0
PARSER = RequestParser()
TOKENS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b"\r",
    b"\n\n",
    b"\r\n\r\n",
    b"\x00",
    b"\xff",
    b"\xc3",
    b"null",
    b"1e999",
    b"data: ",
    b"data: [DONE]\n\n",
    b'"usage":{',
    b'"model":"x"',
    b'"n":2',
    b'"stream":true',
    b'"content":"',
    b'"choices":[]',
    b'"finish_reason":"stop"',
    b"0\r\n\r\n",
    b"5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"content-length: 3\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"POST / HTTP/1.1\r\n",
    b"expect: 100-continue\r\n",
    b"connection: close\r\n",
    b"upgrade: h2c\r\n",
    b"\\u0022",
    b": ping\n\n",
]
WORDS = ["a", " b", "", "\n\n", '"', "\\", "é", "☃", '"content":"x"', "data: [DONE]", '"usage":{}']


def mutate(rng, data):
    """A few random edits; three in ten inputs stay whole."""
    if rng.random() < 0.3:
        return data
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(out))
        match rng.randint(0, 4):
            case 0:
                out[at:at] = rng.choice(TOKENS)
            case 1:
                del out[at : at + rng.randint(1, 8)]
            case 2:
                out[at : at + 1] = rng.randbytes(1)
            case 3:
                end = min(len(out), at + rng.randint(1, 40))
                out[at:at] = out[at:end]
            case _:
                out[at : at + rng.randint(0, 6)] = rng.choice(TOKENS)
    return bytes(out)


def pieces(rng, data):
    """The data in up to five random cuts."""
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4)))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if b > a]


# ---- request bodies


def new_body(rng):
    """A chat, completion, embedding or response body."""
    fields = {"model": rng.choice(["m", "é", 'a"b', "x" * 40])}
    fields[rng.choice(["messages", "prompt", "input"])] = rng.choice(
        [[{"role": "user", "content": "".join(rng.choices(WORDS, k=4))}], "text", [1, 2], None]
    )
    for name, values in (
        ("stream", [True, False, None]),
        ("n", [1, 2, None]),
        ("max_tokens", [0, 16, None]),
        ("stream_options", [None, {}, {"include_usage": False}, {"include_usage": True, "x": 1}]),
        ("tools", [[], [{"type": "function"}]]),
        ("extra", [{"model": "no", "a": [1, {"b": "}"}]}, "\\", 1.5]),
    ):
        if rng.random() < 0.5:
            fields[name] = rng.choice(values)
    items = list(fields.items())
    rng.shuffle(items)
    return json.dumps(dict(items), ensure_ascii=rng.random() < 0.5).encode()


def fuzz_request(rng):
    """One damaged body through parser and splice."""
    raw = mutate(rng, new_body(rng))
    surface = rng.choice((CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES))
    try:
        facts = PARSER.parse(surface, raw)
    except MalformedBody:
        return
    before = json.loads(raw)
    assert before["model"] == facts.model
    out = splice(raw, facts, "other")
    after = json.loads(out)
    if facts.stream and surface.asks_usage:
        assert after["stream_options"]["include_usage"] is True
        assert dict(before.get("stream_options") or {}, include_usage=True) == after.pop(
            "stream_options"
        )
        before.pop("stream_options", None)
    assert after == {**before, "model": "other"}
    start, end = facts.model_span
    edit = facts.usage_edit
    removed = end - start + (edit.end - edit.start if edit else 0)
    added = len(b'"other"') + (len(edit.text) if edit else 0)
    assert len(out) - added == len(raw) - removed
    assert out.endswith(raw[max(end, edit.end if edit else 0) :])


# ---- streams


def new_stream(rng):
    """Events of one answer, and how many of them carry text."""
    events, words = [], 0
    end = rng.choice([b"\n\n", b"\r\n\r\n"])
    spaced = None if rng.random() < 0.3 else (",", ":")

    def event(body):
        events.append(b"data: " + json.dumps(body, separators=spaced).encode() + end)

    event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(rng.randint(0, 6)):
        word = rng.choice(WORDS)
        words += bool(word)
        field = rng.choice(["content", "content", "content", "reasoning_content"])
        event({"choices": [{"index": 0, "delta": {field: word}, "finish_reason": None}]})
    if rng.random() < 0.8:
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    dropped = []
    if rng.random() < 0.8:
        event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": words}})
        dropped.append(events[-1])
    if rng.random() < 0.9:
        events.append(b"data: [DONE]" + end)
    return events, words, dropped


def fuzz_sse(rng):
    """One stream, whole or damaged, through the meter."""
    events, words, dropped = new_stream(rng)
    whole = b"".join(events)
    wire = mutate(rng, whole)
    meter = StreamMeter(CHAT_CONTENT, choices=rng.choice((1, 1, 2)))
    out = b""
    for at, piece in enumerate(pieces(rng, wire)):
        out += meter.feed(piece, float(at))
    out += meter.finish(99.0)
    meter.usage()
    if wire == whole:
        assert out == b"".join(event for event in events if event not in dropped)
        assert meter.events == words
        if dropped:
            assert meter.usage().completion == words
        return
    # Damaged: what came out is what went in, less whole events of the two kinds that may go.
    rest = out
    ends = [0, *(m.end() for m in re.finditer(rb"\n\r?\n|\r\r", wire)), len(wire)]
    for event in (wire[a:b] for a, b in itertools.pairwise(ends)):
        if rest.startswith(event):
            rest = rest[len(event) :]
        else:
            assert b'"usage"' in event or b'"finish_reason"' in event, event
    assert rest == b"", rest


# ---- responses


def new_response(rng):
    """An answer and its body."""
    body = rng.randbytes(rng.randint(0, 60))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: a\r\n"
    if rng.random() < 0.2:
        head = b"HTTP/1.1 100 Continue\r\n\r\n" + head
    if rng.random() < 0.5:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body), body
    framed, rest = b"", body
    while rest:
        size = rng.randint(1, len(rest))
        framed += b"%x\r\n%b\r\n" % (size, rest[:size])
        rest = rest[size:]
    return head + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n", body


def fuzz_response(rng):
    """One answer, whole or damaged, through the reader; sometimes two on one connection."""
    reader = ResponseReader(max_head=512)
    for _ in range(rng.randint(1, 2)):
        reader.reset()
        whole, body = new_response(rng)
        wire = mutate(rng, whole)
        out = b""
        try:
            for piece in pieces(rng, wire):
                out += reader.feed(piece)
        except BackendProtocolError:
            assert wire != whole
            return
        reader.eof()
        if wire == whole:
            assert reader.complete
            assert out == body
        if not reader.reusable:
            return


# ---- the server


class Transport:
    """A transport that goes nowhere."""

    def __init__(self):
        self.closed = False

    def write(self, data):
        """Bytes to the client."""
        assert data

    def get_extra_info(self, name):
        """No peer."""
        return

    def set_write_buffer_limits(self, high):
        """Ignored."""

    def get_write_buffer_size(self):
        """Everything has left."""
        return 0

    def can_write_eof(self):
        """As TCP can."""
        return True

    def write_eof(self):
        """Half closed."""

    def pause_reading(self):
        """Ignored."""

    def resume_reading(self):
        """Ignored."""

    def close(self):
        """Closed."""
        self.closed = True

    abort = close


class Refuse:
    """A dispatcher that reads the body and refuses."""

    def open(self, relay):
        """Parse, then refuse."""
        try:
            relay.facts()
            relay.fail(MalformedBody("fuzz"))
        except MalformedBody as exc:
            relay.fail(exc)


class Loop:
    """Runs what is called soon at once, one after another."""

    def __init__(self):
        self.soon = []

    def call_soon(self, call):
        """Kept until `drain`."""
        self.soon.append(call)

    def drain(self):
        """Run what was kept."""
        while self.soon:
            self.soon.pop(0)()


def new_server():
    """A server without sockets; cold requests end at once."""
    server = GatewayServer(
        Plane(dispatcher=Refuse(), parser=PARSER),
        None,
        limits=ServerLimits(max_head_bytes=600, max_body_bytes=400),
    )
    server.loop = Loop()

    def spawn(call):
        call._reply.start(200, b"", 0)
        call._reply.end()

    server.spawn = spawn
    return server


SERVER = new_server()


def fuzz_server(rng):
    """Requests, whole or damaged, pipelined, through a connection."""
    wire = b""
    for _ in range(rng.randint(1, 3)):
        body = new_body(rng)
        path = rng.choice([b"/v1/chat/completions", b"/v1/embeddings", b"/x?y=1", b"http://h/p"])
        if rng.random() < 0.7:
            framing = b"content-length: %d\r\n\r\n%b" % (len(body), body)
        else:
            framing = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        wire += b"POST %b HTTP/1.1\r\nhost: h\r\n%b" % (path, framing)
    connection = ClientConnection(SERVER)
    transport = Transport()
    connection.connection_made(transport)
    for piece in pieces(rng, mutate(rng, wire)):
        connection.data_received(piece)
        SERVER.loop.drain()
        if transport.closed:
            break
    connection.look(1e12)
    connection.connection_lost(None)
    assert not SERVER.connections


TARGETS = {
    "request": fuzz_request,
    "sse": fuzz_sse,
    "response": fuzz_response,
    "server": fuzz_server,
}


def run(inputs, seed, seconds, targets):
    """Fuzz round robin; return counts and the failure, if any."""
    counts = dict.fromkeys(targets, 0)
    slowest, begun = 0.0, time.monotonic()
    for number in range(inputs):
        name = targets[number % len(targets)]
        rng = random.Random(seed * 1_000_003 + number)
        start = time.process_time()
        try:
            TARGETS[name](rng)
        except Exception as exc:  # noqa: BLE001 - any exception is the finding
            return counts, slowest, (name, number, exc)
        took = time.process_time() - start
        slowest = max(slowest, took)
        if took > HANG_SECONDS:
            return counts, slowest, (name, number, TimeoutError(f"took {took:.2f} s"))
        counts[name] += 1
        if number % 4096 == 0 and seconds and time.monotonic() - begun > seconds:
            break
    return counts, slowest, None


async def main():
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="stop after this long")
    parser.add_argument("--target", choices=TARGETS, action="append")
    args = parser.parse_args()
    PARSER.parse(CHAT, b'{"model":"m","messages":[{}]}')  # compile the scan first
    counts, slowest, failure = run(
        args.inputs, args.seed, args.seconds, args.target or list(TARGETS)
    )
    print(json.dumps({"inputs": sum(counts.values()), **counts, "slowest_s": round(slowest, 4)}))  # noqa: T201
    if failure is not None:
        name, number, exc = failure
        print(f"{name} failed at input {number} of seed {args.seed}: {exc!r}")  # noqa: T201
        raise exc
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
