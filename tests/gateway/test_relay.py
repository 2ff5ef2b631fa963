"""The relay with a fake reply and fake pools: what the dispatcher is told, and when."""

import json

import pytest

from backends.upstream import Timeouts
from backends.wire.openai import CHAT, EMBEDDINGS, RequestParser
from domain.errors import (
    BackendTimeout,
    BackendUnavailable,
    MalformedBody,
    NoReplica,
    StreamInterrupted,
)
from domain.outcome import Cause, Usage, UsageSource
from gateway.relay import ClientRequest, Plane, Relay
from tests.fakes.engine import ANSWER, DONE, ROLE, STOP, USAGE, word

TIMEOUTS = Timeouts()
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]


class FakeExchange:
    """Keeps what the relay asks of it."""

    def __init__(self, pool, body, sink, timeouts, headers):
        self.pool, self.body, self.sink = pool, body, sink
        self.timeouts, self.headers = timeouts, headers
        self.state = "running"
        self.paused = False

    def abort(self):
        """Once."""
        assert self.state == "running"
        self.state = "aborted"

    def pause(self):
        """Paused."""
        self.paused = True

    def resume(self):
        """Not paused."""
        self.paused = False

    def stream(self, *events, now=1.0):
        """The head and some events."""
        self.sink.on_head(200, SSE)
        return [self.sink.on_data(event, now + at) for at, event in enumerate(events)]

    def end(self):
        """The answer is whole."""
        self.state = "over"
        self.sink.on_end()

    def error(self, error):
        """The answer broke."""
        self.state = "over"
        self.sink.on_error(error)


class FakePool:
    """Makes fake exchanges."""

    def __init__(self):
        self.sent = []

    def send(self, path, body, sink, timeouts, *, headers=b""):
        """Keep it."""
        self.sent.append(FakeExchange(self, body, sink, timeouts, headers))
        return self.sent[-1]


class FakeReply:
    """Collects the reply."""

    framed = None

    def __init__(self):
        self.closed = False
        self.head = None
        self.body = b""
        self.ended = None

    def start(self, status, headers, length):
        """Once."""
        assert self.head is None
        self.head = (status, headers, length)

    def write(self, data):
        """Never before start."""
        assert self.head is not None
        assert data
        if not self.closed:
            self.body += data

    def end(self, *, close=False):
        """A good end."""
        self.closed, self.ended = True, "closed" if close else "ended"

    def abort(self):
        """A bad end."""
        self.closed, self.ended = True, "aborted"


class Recorder:
    """A dispatcher that writes down its calls."""

    def __init__(self):
        self.calls = []

    def open(self, relay):
        """Unused: tests drive the relay themselves."""

    def first_token(self, relay, attempt, at):
        """Noted."""
        self.calls.append(("first_token", attempt, at))

    def ended(self, relay, report):
        """Noted."""
        self.calls.append(("ended", report))

    def superseded(self, relay, attempt, usage):
        """Noted."""
        self.calls.append(("superseded", attempt, usage))

    def client_gone(self, relay, usage):
        """Noted."""
        self.calls.append(("client_gone", usage))


class Scene:
    """One relay with its surroundings."""

    def __init__(self, surface=CHAT, keep_alive=None, **fields):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
        if surface is EMBEDDINGS:
            body = {"model": "m", "input": "x"}
        self.dispatcher, self.reply, self.pool = Recorder(), FakeReply(), FakePool()
        self.now = 100.0
        plane = Plane(
            dispatcher=self.dispatcher,
            parser=RequestParser(),
            clock=lambda: self.now,
            keep_alive=keep_alive,
        )
        request = ClientRequest(
            surface=surface,
            headers=[(b"a", b"1"), (b"a", b"2")],
            body=json.dumps(body).encode(),
            received_at=100.0,
        )
        self.relay = Relay(plane, request, self.reply)

    def start(self, attempt=1, model="m", **options):
        """Start an attempt; return its exchange."""
        self.relay.start(attempt, self.pool, model, timeouts=TIMEOUTS, **options)
        return self.pool.sent[-1]

    @property
    def report(self):
        """The only report."""
        (report,) = [call[1] for call in self.dispatcher.calls if call[0] == "ended"]
        return report


def test_a_stream_from_start_to_end():
    scene = Scene(stream=True)
    exchange = scene.start(
        model="engine-name", reply_headers=b"x-a: 1\r\n", upstream_headers=b"t: 2\r\n"
    )
    assert json.loads(exchange.body)["model"] == "engine-name"
    assert (exchange.headers, exchange.timeouts) == (b"t: 2\r\n", TIMEOUTS)
    progress = exchange.stream(ROLE, word("a"), word("b"), STOP, USAGE, DONE)
    assert progress == [False, True, True, False, False, False]
    exchange.end()
    status, headers, length = scene.reply.head
    assert (status, length) == (200, None)
    assert b"text/event-stream" in headers
    assert headers.endswith(b"x-a: 1\r\n")
    assert scene.reply.body == ROLE + word("a") + word("b") + STOP + DONE
    assert scene.reply.ended == "ended"
    assert scene.dispatcher.calls[0] == ("first_token", 1, 2.0)
    assert scene.report == (
        1,
        100.0,
        Cause.FINISHED,
        Usage(prompt=7, completion=2, thinking=0, source=UsageSource.ENGINE),
        2.0,
        3.0,
        200,
        None,
        False,
    )
    assert scene.relay.over


def test_thinking_is_counted_apart():
    """The engine's count of all tokens, shared out by the events of both parts."""
    scene = Scene(stream=True)
    exchange = scene.start()
    thought = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"}}]}\n\n'
    exchange.stream(ROLE, thought, thought, thought)
    assert scene.relay.running(1).thought is None
    exchange.sink.on_data(word("a"), 9.0)
    assert scene.relay.running(1).thought == 3
    exchange.sink.on_data(STOP + USAGE.replace(b": 2", b": 8").replace(b":2", b":8") + DONE, 9.1)
    exchange.end()
    assert (scene.report.usage.completion, scene.report.usage.thinking) == (8, 6)


def test_nothing_reaches_the_client_before_the_first_content():
    scene = Scene(stream=True)
    exchange = scene.start()
    exchange.stream(b": wait\n\n", ROLE)
    assert scene.reply.head is None
    assert not scene.relay.committed
    exchange.sink.on_data(word("a"), 5.0)
    assert scene.reply.body == b": wait\n\n" + ROLE + word("a")
    assert scene.relay.committed


def test_tokens_are_asked_for_not_told():
    scene = Scene(stream=True)
    exchange = scene.start()
    assert scene.relay.tokens(1) == 0
    exchange.stream(ROLE, word("a") + word("b"), word("c"))
    assert scene.relay.tokens(1) == 3
    assert scene.relay.tokens(2) == 0
    assert [call[0] for call in scene.dispatcher.calls] == ["first_token"]


def test_unstreamed_answers_have_no_first_token_limit_and_a_length():
    scene = Scene()
    exchange = scene.start()
    assert exchange.timeouts.first_token is None
    assert exchange.timeouts.total == TIMEOUTS.total
    exchange.sink.on_head(200, JSON)
    assert exchange.sink.on_data(ANSWER[:9], 1.0) is True
    exchange.sink.on_data(ANSWER[9:], 1.0)
    assert scene.reply.head is None
    exchange.end()
    assert scene.reply.head[2] == len(ANSWER)
    assert scene.reply.body == ANSWER
    assert [call[0] for call in scene.dispatcher.calls] == ["ended"]
    assert (scene.report.first_token, scene.report.usage.completion) == (None, 2)


def test_a_failed_attempt_may_be_followed_by_another():
    scene = Scene(stream=True)
    first = scene.start(1)
    first.stream(ROLE)
    first.error(StreamInterrupted("closed"))
    assert scene.report.cause is Cause.REFUSED
    assert isinstance(scene.report.error, BackendUnavailable)
    assert scene.report.retryable
    second = scene.start(2, reply_headers=b"x-a: second\r\n")
    second.stream(ROLE, word("a"), STOP, DONE)
    second.end()
    assert scene.reply.body == ROLE + word("a") + STOP + DONE
    assert scene.reply.head[1].endswith(b"x-a: second\r\n")


def test_a_refusal_before_the_answer_is_an_http_error():
    scene = Scene(stream=True)
    scene.relay.error_headers = b"x-request-id: 7\r\n"
    scene.relay.fail(NoReplica("none", retry_after=3))
    status, headers, length = scene.reply.head
    assert status == 503
    assert b"retry-after: 3\r\n" in headers
    assert headers.endswith(b"x-request-id: 7\r\n")
    assert length == len(scene.reply.body)
    assert json.loads(scene.reply.body)["error"]["code"] == "no_replica"
    assert scene.reply.ended == "ended"


def test_fail_aborts_what_runs_and_only_the_first_call_counts():
    scene = Scene(stream=True)
    exchange = scene.start()
    scene.relay.fail(NoReplica("none"))
    scene.relay.fail(NoReplica("again"))
    assert exchange.state == "aborted"
    assert scene.relay.over
    scene.relay.start(2, scene.pool, "m", timeouts=TIMEOUTS)
    assert len(scene.pool.sent) == 1
    assert scene.dispatcher.calls == []


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StreamInterrupted("gone"), Cause.INTERRUPTED),
        (BackendTimeout("slow", phase="between_tokens"), Cause.TIMEOUT),
    ],
)
def test_a_broken_stream_ends_with_an_error_event(error, cause):
    scene = Scene(stream=True)
    exchange = scene.start()
    exchange.stream(ROLE, word("a"), word("half")[:20])
    exchange.error(error)
    body = scene.reply.body
    assert body.startswith(ROLE + word("a") + b'data: {"error":')
    assert body.endswith(b"}\n\n")
    assert body.count(b"\n\n") == 3
    assert scene.reply.ended == "closed"
    assert (scene.report.cause, scene.report.retryable) == (cause, False)
    assert scene.report.usage == Usage(completion=1, thinking=0, source=UsageSource.COUNTED)


def test_a_stream_that_breaks_after_the_engine_s_own_error_tells_one_error():
    scene = Scene(stream=True)
    exchange = scene.start()
    said = b'data: {"error": {"message": "out of memory"}}\n\n'
    exchange.stream(ROLE, word("a"), said)
    exchange.error(StreamInterrupted("gone"))
    assert scene.reply.body == ROLE + word("a") + said
    assert scene.reply.ended == "closed"
    assert scene.report.cause is Cause.INTERRUPTED


def test_a_long_answer_that_breaks_is_cut():
    scene = Scene(surface=EMBEDDINGS)
    exchange = scene.start()
    exchange.sink.on_head(
        200, [(b"content-type", b"application/json"), (b"content-length", b"200000")]
    )
    exchange.sink.on_data(b"[" * 100_000, 1.0)
    assert scene.reply.head[2] == 200_000
    exchange.error(StreamInterrupted("gone"))
    assert scene.reply.ended == "aborted"
    assert scene.report.cause is Cause.INTERRUPTED


def test_the_client_s_leaving_aborts_and_is_told_once():
    scene = Scene(stream=True)
    exchange = scene.start()
    exchange.stream(ROLE, word("a"), word("b"))
    scene.relay.client_gone()
    scene.relay.client_gone()
    assert exchange.state == "aborted"
    assert scene.dispatcher.calls[1:] == [
        ("client_gone", Usage(completion=2, thinking=0, source=UsageSource.COUNTED))
    ]
    scene.relay.fail(NoReplica("late"))
    assert scene.reply.ended is None


def test_a_stalled_client_counts_as_gone():
    scene = Scene(stream=True)
    exchange = scene.start()
    exchange.stream(ROLE, word("a"))
    scene.relay.pause()
    assert exchange.paused
    exchange.state = "over"
    exchange.abort = lambda: None  # the exchange is over when it tells of a stall
    exchange.sink.on_stall()
    assert scene.reply.ended == "aborted"
    assert scene.dispatcher.calls[-1][0] == "client_gone"


def test_pause_and_resume_reach_the_exchange_that_answers():
    scene = Scene(stream=True)
    exchange = scene.start()
    scene.relay.pause()
    assert not exchange.paused
    exchange.stream(ROLE, word("a"))
    assert exchange.paused
    scene.relay.resume()
    assert not exchange.paused


def test_of_two_attempts_the_first_content_wins():
    scene = Scene(stream=True)
    slow, quick = scene.start(1), scene.start(2)
    slow.stream(ROLE)
    quick.stream(ROLE, word("a"))
    assert slow.state == "aborted"
    assert scene.dispatcher.calls == [("superseded", 1, Usage()), ("first_token", 2, 2.0)]
    quick.sink.on_data(STOP + DONE, 3.0)
    quick.end()
    assert scene.reply.body == ROLE + word("a") + STOP + DONE


def test_a_hedge_that_fails_leaves_the_other_alone():
    scene = Scene(stream=True)
    good, bad = scene.start(1), scene.start(2)
    bad.error(BackendUnavailable("no"))
    assert scene.report.attempt == 2
    good.stream(word("a"), STOP, DONE)
    good.end()
    assert scene.reply.ended == "ended"


def test_abort_of_an_attempt_is_silent_and_tells_what_it_had():
    scene = Scene(stream=True)
    one, other = scene.start(1), scene.start(2)
    assert scene.relay.abort(1) == Usage()
    assert (one.state, other.state) == ("aborted", "running")
    other.stream(word("a"))
    assert scene.relay.abort(2).completion == 1
    assert scene.reply.ended == "aborted"
    assert scene.relay.abort(3) == Usage()
    assert [call[0] for call in scene.dispatcher.calls] == ["first_token"]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_the_engine_s_view_of_a_bad_request_is_the_client_s(status):
    scene = Scene(stream=True)
    exchange = scene.start()
    body = b'{"error":{"message":"no"}}'
    exchange.sink.on_head(status, [(b"content-type", b"application/json")])
    exchange.sink.on_data(body, 1.0)
    exchange.sink.on_end()
    assert scene.reply.head[0] == status
    assert scene.reply.body == body
    assert (scene.report.cause, scene.report.status) == (Cause.REJECTED, status)
    assert not scene.report.retryable


@pytest.mark.parametrize("status", [301, 401, 403, 408, 429, 500, 503])
def test_the_engine_s_own_trouble_is_not(status):
    scene = Scene()
    exchange = scene.start()
    exchange.sink.on_head(status, [])
    exchange.sink.on_data(b'{"error":"out of memory"}', 1.0)
    exchange.sink.on_end()
    assert scene.reply.head is None
    assert (scene.report.cause, scene.report.status) == (Cause.REFUSED, status)
    assert "out of memory" in scene.report.error.message
    assert scene.report.retryable


def test_silence_is_bridged_by_comments_at_their_pace():
    scene = Scene(stream=True, keep_alive=10.0)
    scene.relay.early_headers = b"x-request-id: 7\r\n"
    scene.relay.keep_alive(150.0)
    assert scene.reply.head is None  # not before the body was read: it may not be a stream
    exchange = scene.start()
    for now in (105.0, 110.0, 112.0, 120.0):
        scene.relay.keep_alive(now)
    assert scene.reply.body == b": keep-alive\n\n" * 2
    assert scene.reply.head[1].endswith(b"x-request-id: 7\r\n")
    exchange.stream(ROLE, word("a"), now=121.0)
    scene.relay.keep_alive(125.0)
    assert scene.reply.body.endswith(word("a"))
    scene.relay.keep_alive(133.0)
    assert scene.reply.body.endswith(b": keep-alive\n\n")


def test_a_refusal_after_a_comment_is_an_event():
    scene = Scene(stream=True, keep_alive=10.0)
    scene.start()
    scene.relay.keep_alive(110.0)
    scene.relay.fail(NoReplica("none"))
    assert scene.reply.body.startswith(b': keep-alive\n\ndata: {"error":')
    assert scene.reply.ended == "closed"


def test_an_unstreamed_request_gets_no_comments():
    scene = Scene(keep_alive=10.0)
    scene.start()
    scene.relay.keep_alive(200.0)
    assert scene.reply.head is None


def test_the_body_is_read_when_asked_for():
    scene = Scene(n=0)
    assert scene.relay.request.header(b"a") == b"1"
    assert scene.relay.request.header(b"b") is None
    with pytest.raises(MalformedBody):
        scene.relay.facts()


def test_a_stream_without_its_done_gets_one():
    scene = Scene(stream=True)
    exchange = scene.start()
    exchange.stream(word("a"), STOP)
    exchange.end()
    assert scene.reply.body == word("a") + STOP + DONE
