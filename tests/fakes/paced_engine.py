"""An OpenAI engine that gives tokens at a pace, counts what it runs, and misbehaves when told."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from tests.fakes.engine import DONE, ROLE, SSE_HEAD, STOP, answer, chunk, event, word

MODELS = json.dumps(
    {"object": "list", "data": [{"id": "paced", "object": "model", "owned_by": "llamacpp"}]}
).encode()


class PacedEngine:
    """Listens on a free port once `running`. `slots` requests run at once, the rest wait their
    turn; each gives `max_tokens` tokens (`tokens` without), one every `pace` seconds after
    `prefill` seconds.

    `failing` answers every prompt with a 500, `refusing` with a 400; `silent` reads prompts and
    never answers.
    """

    def __init__(
        self, *, slots: int = 2, pace: float = 0.002, prefill: float = 0.002, tokens: int = 8
    ) -> None:
        self.slots = slots
        self.pace = pace
        self.prefill = prefill
        self.tokens = tokens
        self.failing = False
        self.refusing = False
        self.silent = False
        self.busy = 0
        self.served = 0
        self.aborted = 0
        self.bodies: list[dict] = []
        self.port = 0
        self._turn = asyncio.Semaphore(slots)
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["PacedEngine"]:
        """Serve inside the `async with`."""
        await self.start()
        try:
            yield self
        finally:
            await self.kill()

    async def start(self) -> None:
        """Listen; on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = 0
                if b"content-length:" in head:
                    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                if head.startswith(b"get"):
                    writer.write(self._page(head.split(b" ")[1]))
                else:
                    await self._generate(json.loads(body), reader, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def _page(self, path: bytes) -> bytes:
        if path == b"/v1/models":
            return answer(MODELS)
        if path == b"/props":
            return answer(
                json.dumps(
                    {"total_slots": self.slots, "default_generation_settings": {"n_ctx": 2048}}
                ).encode()
            )
        if path == b"/metrics":
            running = min(self.busy, self.slots)
            text = (
                f"llamacpp:requests_processing {running}\n"
                f"llamacpp:requests_deferred {self.busy - running}\n"
            )
            return answer(text.encode(), kind=b"text/plain")
        return answer(b'{"status":"ok"}')

    async def _generate(
        self, body: dict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.bodies.append(body)
        if self.failing:
            writer.write(answer(b'{"error":{"message":"broken"}}', b"500 Internal Server Error"))
            return
        if self.refusing:
            writer.write(answer(b'{"error":{"message":"no such template"}}', b"400 Bad Request"))
            return
        self.busy += 1
        leaving = asyncio.ensure_future(reader.read(1))
        working = asyncio.ensure_future(self._stream(body, writer))
        try:
            await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self.aborted += 1
                raise ConnectionResetError
            await working
            self.served += 1
        finally:
            self.busy -= 1
            leaving.cancel()
            working.cancel()
            await asyncio.gather(leaving, working, return_exceptions=True)

    async def _stream(self, body: dict, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            await asyncio.Event().wait()
        count = int(body.get("max_tokens") or self.tokens)
        async with self._turn:
            await asyncio.sleep(self.prefill)
            usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
            if not body.get("stream"):
                await asyncio.sleep(self.pace * count)
                writer.write(answer(json.dumps(_whole(count, usage)).encode()))
                return
            writer.write(SSE_HEAD + chunk(ROLE))
            for i in range(count):
                writer.write(chunk(word(f"w{i} ")))
                await writer.drain()
                await asyncio.sleep(self.pace)
            writer.write(chunk(STOP))
            if (body.get("stream_options") or {}).get("include_usage"):
                told = event(
                    id="c",
                    object="chat.completion.chunk",
                    created=1,
                    model="m",
                    choices=[],
                    usage=usage,
                )
                writer.write(chunk(told))
            writer.write(chunk(DONE) + b"0\r\n\r\n")


def _whole(count: int, usage: dict) -> dict:
    text = " ".join(f"w{i}" for i in range(count))
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": usage,
    }
