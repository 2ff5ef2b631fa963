"""What became of one request: the line from which everything learns."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from domain.request import InferenceRequest
from domain.values import dataclass


class Cause(StrEnum):
    """Why an attempt, or a request, ended."""

    FINISHED = "finished"
    CLIENT_GONE = "client_gone"
    REFUSED = (
        "refused"  # connection refused or closed before the first byte, or 5xx/429 from the engine
    )
    REJECTED = "rejected"  # a 4xx of the engine: the request's own fault, relayed as it is
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"  # died after the first byte had reached the client
    SHED = "shed"


class UsageSource(StrEnum):
    """Where the output count came from."""

    ENGINE = "engine"
    COUNTED = "counted"
    NONE = "none"


class Miss(StrEnum):
    """Which part is to blame for a missed limit; `NONE` where all were met."""

    NONE = "none"
    QUEUE = "queue"
    PREDICTION = "prediction"
    ENGINE = "engine"
    ADMISSION = "admission"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one attempt. `cached` counts prompt tokens that the engine found in its prefix
    cache, `thinking` those of the completion that came before the answer; None: not known.
    """

    prompt: float = 0.0
    completion: float = 0.0
    cached: float = 0.0
    thinking: float | None = None
    source: UsageSource = UsageSource.NONE


class Prediction(NamedTuple):
    """What was predicted for the chosen route when it was chosen; joins one to one with the
    outcome.

    `ttft` and `tpot` are quantiles at `domain.columns.LOAD_GRID`; TTFT counts from the decision.
    `length_p90` is in tokens. A tuple, since one is made per decision and a frozen dataclass costs
    three times as much.
    """

    ttft: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()
    p_slo: float = 0.0
    p_raw: float = 0.0
    quality: float = 0.0
    length_mean: float = 0.0
    length_p50: float = 0.0
    length_p90: float = 0.0
    cached: float = 0.0
    wait: float = 0.0
    # state of the route's replicas just before it was booked
    running: float = 0.0
    context: float = 0.0
    backlog: float = 0.0
    staleness: float = 0.0
    basis: tuple[float, ...] = ()
    """The row a learned latency model saw (`predictors.latency`); empty where there is none."""
    thinking_p50: float = 0.0
    """Tokens before the answer; 0 where the model was never seen to think."""

    @property
    def answer_p50(self) -> float | None:
        """Seconds from the decision to the first token of the answer; None where the model was
        never seen to think, so that it is the TTFT.
        """
        if not self.thinking_p50 or not self.ttft or not self.tpot:
            return None
        middle = len(self.ttft) // 2
        return self.ttft[middle] + self.thinking_p50 * self.tpot[middle]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One settled request. Times are absolute on the shell's clock; None where the event never
    came.

    `route` and `replica` are of the last attempt, None if it was never sent. `met` is None where
    the request leaves the denominator (a cancel before any limit was missed, DESIGN section 11).
    """

    request: InferenceRequest
    cause: Cause
    arrived: float
    ended: float
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    route: int | None = None
    replica: int | None = None
    variant: int | None = None
    attempts: int = 0
    usage: Usage = Usage()
    prediction: Prediction | None = None
    propensity: float = 1.0
    policy: str = ""
    version: str = ""
    met: bool | None = None
    miss: Miss = Miss.NONE
    reason: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first content byte."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for one token or none."""
        if self.first_token is None or self.last_token is None or self.usage.completion <= 1:
            return None
        return (self.last_token - self.first_token) / (self.usage.completion - 1)

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrived


def limits_met(outcome: Outcome) -> bool:
    """Whether every latency limit the request carries was met (DESIGN section 11).

    TTFT and TPOT count only for streamed requests; one token meets any TPOT; an answer that never
    finished misses.
    """
    if outcome.cause is not Cause.FINISHED:
        return False
    slo = outcome.request.slo
    if slo.e2e is not None and outcome.e2e > slo.e2e:
        return False
    if not outcome.request.stream:
        return True
    if slo.ttft is not None and (outcome.ttft is None or outcome.ttft > slo.ttft):
        return False
    return not (slo.tpot is not None and outcome.tpot is not None and outcome.tpot > slo.tpot)
