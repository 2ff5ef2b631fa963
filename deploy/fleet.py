"""The local fleet of compose.yaml in one process: three llama.cpp children on fixed ports.

    python -m deploy.fleet

They listen on 127.0.0.1; the gateways of compose.yaml share this container's network. Ends on
SIGTERM, and its children with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal

from backends.local import LocalFleet, LocalReplica

REPLICAS = (
    LocalReplica(name="full", variant="f16", port=9101),
    LocalReplica(name="half", variant="q8_0", port=9102),
    LocalReplica(name="quarter", variant="q4_0", port=9103),
)


async def main() -> None:
    """Serve until told to stop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with LocalFleet(list(REPLICAS)):
        await stop.wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
