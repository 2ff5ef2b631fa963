"""An engine that follows a script: what it reads, what it sends, when it hangs up."""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from socket import SO_LINGER, SOL_SOCKET

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def event(**body: object) -> bytes:
    """One SSE event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def word(text: str, finish: str | None = None) -> bytes:
    """One chat event with text."""
    delta = {"content": text} if text else {}
    return event(
        id="c",
        object="chat.completion.chunk",
        created=1,
        model="m",
        choices=[{"index": 0, "delta": delta, "finish_reason": finish}],
    )


ROLE = event(
    id="c",
    object="chat.completion.chunk",
    created=1,
    model="m",
    choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
)
STOP = word("", "stop")
USAGE = event(
    id="c",
    object="chat.completion.chunk",
    created=1,
    model="m",
    choices=[],
    usage={"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
)
DONE = b"data: [DONE]\n\n"
ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }
).encode()


def answer(body: bytes = ANSWER, status: bytes = b"200 OK", kind: bytes = b"application/json"):
    """A whole answer with a length."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        kind,
        len(body),
        body,
    )


def stream(*events: bytes) -> bytes:
    """A whole chunked stream, one chunk an event."""
    return SSE_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK


class EngineConnection:
    """The engine's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
        return head, await self._reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        """Write and wait until the kernel has it."""
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        """Wait until the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass

    def half_close(self) -> None:
        """Send FIN, go on reading."""
        self._writer.write_eof()

    def reset(self) -> None:
        """Close with RST."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[["ScriptedEngine", EngineConnection], Awaitable[None]]


class ScriptedEngine:
    """Listens on a free port; every connection runs the script, then is closed.

    `requests` holds (head, body) of all requests; `connections` counts connections. `left` is for
    the script to set, `seen` for the test: two ends of one story without sleeps.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.left = asyncio.Event()
        self.seen = asyncio.Event()
        self.port = 0
        self._tasks: set[asyncio.Task] = set()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def take(self, connection: EngineConnection) -> bytes:
        """Read one request and keep it; return its body."""
        self.requests.append(await connection.request())
        return self.requests[-1][1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._script(self, EngineConnection(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # the engine is being closed; the stream server logs cancellations as errors
        finally:
            self._tasks.discard(task)
            writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedEngine"]:
        """Serve inside the `async with`."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def always(data: bytes) -> Script:
    """A script that answers every request of a connection with the same bytes."""

    async def script(engine: ScriptedEngine, connection: EngineConnection) -> None:
        while True:
            await engine.take(connection)
            await connection.send(data)

    return script


def once(*steps: bytes) -> Script:
    """A script that reads one request, sends the pieces, and hangs up."""

    async def script(engine: ScriptedEngine, connection: EngineConnection) -> None:
        await engine.take(connection)
        for step in steps:
            await connection.send(step)

    return script


async def refused_url() -> str:
    """An address where nothing listens."""
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return f"http://127.0.0.1:{port}"
