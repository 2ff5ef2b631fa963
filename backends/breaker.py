"""Circuit breaker of one replica. No I/O and no clock: time comes with every call.

    state      what happened                        next
    closed     `limit` failures in a row            open for `pause` s
    open       the pause is over                    half-open
    half-open  a request is sent                    probing (nothing else is let in)
    probing    it gave at least one token           closed
    probing    it failed                            open, pause doubled up to `longest_pause`
    probing    neutral (4xx, client gone untouched) half-open

Only a real generation closes it: an engine whose health check answers may still fail every prompt.
A 4xx is the request's fault and says nothing about the replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where the breaker stands; see the table above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    PROBING = "probing"


class Result(StrEnum):
    """What an attempt says about its replica."""

    GENERATED = "generated"
    FAILED = "failed"
    NEUTRAL = "neutral"


@dataclass(slots=True)
class Breaker:
    """See the module's table. `pause` and `longest_pause` in seconds."""

    limit: int = 3
    pause: float = 1.0
    longest_pause: float = 30.0
    state: State = State.CLOSED
    opens_until: float | None = None
    _failures: int = 0
    _next_pause: float = 0.0

    def admits(self) -> bool:
        """Whether a request may be sent now."""
        return self.state is State.CLOSED or self.state is State.HALF_OPEN

    def sent(self) -> None:
        """A request goes out; in half-open it is the probe."""
        if self.state is State.HALF_OPEN:
            self.state = State.PROBING

    def ended(self, result: Result, at: float) -> None:
        """An attempt ended. One that was sent before the breaker opened closes nothing."""
        match result:
            case Result.GENERATED:
                if self.state in {State.CLOSED, State.PROBING}:
                    self._close()
            case Result.FAILED:
                self._failed(at)
            case Result.NEUTRAL:
                if self.state is State.PROBING:
                    self.state = State.HALF_OPEN

    def tick(self, at: float) -> None:
        """Time passed."""
        if self.state is State.OPEN and self.opens_until is not None and at >= self.opens_until:
            self.state = State.HALF_OPEN
            self.opens_until = None

    def _failed(self, at: float) -> None:
        match self.state:
            case State.CLOSED:
                self._failures += 1
                if self._failures >= self.limit:
                    self._open(at, self.pause)
            case State.PROBING:
                self._open(at, self._next_pause)
            case State.OPEN | State.HALF_OPEN:
                pass  # sent before it opened: already counted against the replica

    def _open(self, at: float, pause: float) -> None:
        self.state = State.OPEN
        self.opens_until = at + pause
        self._next_pause = min(2 * pause, self.longest_pause)

    def _close(self) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self.opens_until = None
