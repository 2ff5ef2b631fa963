"""One tree of errors; the class says whose fault it was and how far the request had come.

    ServingError
    |-- InvalidRequest   client's fault: MalformedBody, PayloadTooLarge, Unauthenticated,
    ModelForbidden, |                    UnknownModel, ContextTooLong, UnknownRequest,
    |                    FeedbackRepeated
    |-- Rejected         never queued: RateLimited, QuotaExhausted, QueueFull, DeadlineUnreachable,
    NoReplica |-- Evicted          queued, never sent: DeadlineExpired, ClientGone, ShuttingDown
    `-- BackendError     sent: BackendUnavailable, BackendTimeout, BackendProtocolError,
    StreamInterrupted ConfigError          at start-up only
    ShapeError           in numeric code; a bug, never a response

HTTP status codes live in `gateway/error_map.py` alone.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Phase = Literal["connect", "first_token", "between_tokens", "total"]


class ServingError(Exception):
    """Base of everything a client can be told.

    `retryable` says whether the same request may be tried on another replica while no byte has
    reached the client. `param` names the offending field of the request body, when there is one.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ServingError):
    """The client's fault; the same request will fail again."""


class MalformedBody(InvalidRequest):
    """The body is not the JSON that the endpoint takes."""


class PayloadTooLarge(InvalidRequest):
    """The body is larger than the gateway accepts."""


class Unauthenticated(InvalidRequest):
    """No key, or one that nobody holds."""


class ModelForbidden(InvalidRequest):
    """The tenant may not use this model."""


class UnknownModel(InvalidRequest):
    """No variant answers to this model name."""


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the context of any replica that serves the model."""


class UnknownRequest(InvalidRequest):
    """No recent answer has this id, or it is another tenant's."""


class FeedbackRepeated(InvalidRequest):
    """The answer has been judged already."""


class Rejected(ServingError):
    """Refused before it was queued; nothing was charged.

    `retry_after` is the time in seconds after which a new try should pass.
    """

    def __init__(
        self, message: str, *, retry_after: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class RateLimited(Rejected):
    """The tenant's token or request bucket is empty."""


class QuotaExhausted(Rejected):
    """A daily quota (tokens or cost) is used up."""


class QueueFull(Rejected):
    """The queue holds as much as it may."""


class DeadlineUnreachable(Rejected):
    """No replica can meet the request's limits any more, and its class is shed rather than served
    late.
    """


class NoReplica(Rejected):
    """No replica that serves the model is usable."""


class Evicted(ServingError):
    """Queued, but never sent to a replica."""

    def __init__(
        self, message: str, *, retry_after: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class DeadlineExpired(Evicted):
    """Its latest useful start passed while it waited."""


class ClientGone(Evicted):
    """The client closed the connection; logged as 499, sent to nobody."""


class ShuttingDown(Evicted):
    """The gateway drains and takes no new work."""


class BackendError(ServingError):
    """The replica failed after the request was sent to it.

    `said` are the engine's own words. They end the message, which is the client's, but may repeat
    what the client sent: `detail` is the message without them, for logs. Of our side's addresses it
    is the other way round: `log` is what logs are told instead of the message.
    """

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, said: str = "", log: str = "") -> None:
        super().__init__(f"{message}: {said}" if said else message)
        self.detail = log or message


class BackendUnavailable(BackendError):
    """The replica refused the connection or closed it before the first byte."""


class BackendTimeout(BackendError):
    """One of the four timeouts ran out; `phase` names it."""

    def __init__(self, message: str, *, phase: Phase, log: str = "") -> None:
        super().__init__(message, log=log)
        self.phase: Phase = phase


class BackendProtocolError(BackendError):
    """The replica sent something that is not HTTP, or not what it announced."""


class StreamInterrupted(BackendError):
    """The replica died after its first byte had reached the client."""

    retryable: ClassVar[bool] = False


class ConfigError(Exception):
    """A configuration that cannot be served; the message names the value, its line and the
    remedy.
    """


class ShapeError(Exception):
    """Arrays that do not fit each other: a bug in numeric code."""
