"""A dispatcher without a core: least requests over fixed replicas, retried once elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass, field

from backends.upstream import Timeouts, UpstreamPool
from domain.errors import BackendUnavailable, NoReplica, ServingError
from domain.outcome import Usage
from gateway.relay import AttemptReport, Relay


@dataclass
class _Open:
    """What the dispatcher keeps of one request in `relay.context`."""

    attempts: int = 0
    replica: int = 0
    tried: set[int] = field(default_factory=set)


class LeastRequests:
    """Sends to the replica with the fewest open requests. Keeps every call it gets in `calls`."""

    def __init__(
        self,
        pools: list[UpstreamPool],
        *,
        timeouts: Timeouts | None = None,
        model: str | None = None,
        max_attempts: int = 2,
        keep_calls: bool = True,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.pools = pools
        self.timeouts = timeouts or Timeouts()
        self.model = model
        self.max_attempts = max_attempts
        self.running = [0] * len(pools)
        self.calls: list[tuple] = []
        self.keep_calls = keep_calls
        self.on_first = on_first
        self._turn = 0

    def open(self, relay: Relay) -> None:
        """A request: refuse it or try the first replica."""
        relay.context = _Open()
        self._note("open", relay)
        try:
            relay.facts()
        except ServingError as exc:
            relay.fail(exc)
            return
        self._try(relay)

    def first_token(self, relay: Relay, attempt: int, at: float) -> None:
        """Note it."""
        self._note("first_token", relay, attempt, at)
        self.on_first()

    def ended(self, relay: Relay, report: AttemptReport) -> None:
        """Note it; try elsewhere while there is a try left."""
        self._note("ended", relay, report)
        self.running[relay.context.replica] -= 1
        if not report.retryable:
            return
        if relay.context.attempts < self.max_attempts:
            self._try(relay)
        else:
            relay.fail(report.error or BackendUnavailable("no replica answered"))

    def superseded(self, relay: Relay, attempt: int, usage: Usage) -> None:
        """Note it."""
        self._note("superseded", relay, attempt, usage)

    def client_gone(self, relay: Relay, usage: Usage) -> None:
        """Note it and free the replica."""
        self._note("client_gone", relay, usage)
        if relay.context.attempts:
            self.running[relay.context.replica] -= 1

    def _try(self, relay: Relay) -> None:
        state = relay.context
        free = [i for i in range(len(self.pools)) if i not in state.tried]
        if not free:
            relay.fail(NoReplica("every replica was tried", retry_after=1.0))
            return
        self._turn += 1
        chosen = min(free, key=lambda i: (self.running[i], (i + self._turn) % len(self.pools)))
        state.attempts += 1
        state.replica = chosen
        state.tried.add(chosen)
        self.running[chosen] += 1
        relay.start(
            state.attempts,
            self.pools[chosen],
            self.model or relay.facts().model,
            timeouts=self.timeouts,
            reply_headers=b"x-sluice-replica: %d\r\n" % chosen,
        )

    def _note(self, *call: object) -> None:
        if self.keep_calls:
            self.calls.append(call)
