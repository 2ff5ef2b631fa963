"""The reply over a foreign ASGI server's `send`."""

import asyncio

import pytest

from gateway.asgi import AsgiReply


class Listener:
    """Counts what it is told."""

    def __init__(self):
        self.left = 0

    def client_gone(self):
        """The client has left."""
        self.left += 1


@pytest.mark.parametrize("how", ["end", "abort", "leave"])
def test_a_reply_that_is_over_lets_go_of_its_listener(how):
    """Relay and reply refer to each other: kept, both would wait for the garbage collector."""

    async def main():
        sent = []

        async def receive():
            if how != "leave":
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message["type"])

        reply = AsgiReply(receive, send)
        reply.listener = listener = Listener()
        reply.start(200, b"content-type: text/plain\r\n", None)
        reply.write(b"x")
        if how == "end":
            reply.end()
        elif how == "abort":
            reply.abort()
        await asyncio.wait_for(reply.run(), 5)
        assert reply.closed
        assert reply.listener is None
        assert listener.left == (how == "leave")
        assert ("http.response.body" in sent) == (how != "abort")

    asyncio.run(main())
