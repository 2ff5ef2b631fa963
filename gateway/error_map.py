"""Which HTTP answer each error becomes: the only module that knows status codes.

Bodies have OpenAI's form. After the first byte of a stream the same body goes out as an SSE event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from domain import errors
from domain.events import Reason, Shed


class Row(NamedTuple):
    """Status, and OpenAI's `type` and `code`."""

    status: int
    type: str
    code: str


ROWS: dict[type[errors.ServingError], Row] = {
    errors.InvalidRequest: Row(400, "invalid_request_error", "invalid_request"),
    errors.MalformedBody: Row(400, "invalid_request_error", "invalid_request"),
    errors.PayloadTooLarge: Row(413, "invalid_request_error", "payload_too_large"),
    errors.Unauthenticated: Row(401, "authentication_error", "invalid_api_key"),
    errors.ModelForbidden: Row(403, "permission_error", "model_forbidden"),
    errors.UnknownModel: Row(404, "invalid_request_error", "model_not_found"),
    errors.ContextTooLong: Row(400, "invalid_request_error", "context_length_exceeded"),
    errors.UnknownRequest: Row(404, "invalid_request_error", "request_not_found"),
    errors.FeedbackRepeated: Row(409, "invalid_request_error", "feedback_repeated"),
    errors.RateLimited: Row(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.QuotaExhausted: Row(429, "rate_limit_error", "insufficient_quota"),
    errors.QueueFull: Row(503, "server_error", "queue_full"),
    errors.DeadlineUnreachable: Row(503, "server_error", "slo_unreachable"),
    errors.NoReplica: Row(503, "server_error", "no_replica"),
    errors.DeadlineExpired: Row(503, "server_error", "deadline_expired"),
    errors.ClientGone: Row(499, "server_error", "client_gone"),
    errors.ShuttingDown: Row(503, "server_error", "shutting_down"),
    errors.BackendUnavailable: Row(502, "server_error", "backend_unavailable"),
    errors.BackendTimeout: Row(504, "server_error", "backend_timeout"),
    errors.BackendProtocolError: Row(502, "server_error", "backend_protocol_error"),
    errors.StreamInterrupted: Row(502, "server_error", "stream_interrupted"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """One HTTP answer: status, OpenAI's JSON body, and `Retry-After` where waiting helps."""

    status: int
    body: bytes
    retry_after: int | None = None

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Headers that belong to the error, names in lower case."""
        content = ((b"content-type", b"application/json"),)
        if self.retry_after is None:
            return content
        return (*content, (b"retry-after", b"%d" % self.retry_after))

    @property
    def sse(self) -> bytes:
        """The same error as the last event of a stream that had begun."""
        return b"data: " + self.body + b"\n\n"


def reply(error: errors.ServingError) -> ErrorReply:
    """The answer to an error. `Retry-After` is in whole seconds, at least one."""
    row = ROWS[type(error)]
    body = {
        "error": {
            "message": error.message,
            "type": row.type,
            "param": error.param,
            "code": row.code,
        }
    }
    wait = getattr(error, "retry_after", None)
    return ErrorReply(
        status=row.status,
        body=orjson.dumps(body),
        retry_after=None if wait is None else max(1, math.ceil(wait)),
    )


def http_reply(status: int, message: str) -> ErrorReply:
    """The answer to what never was a request: an unknown path, a wrong method."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return ErrorReply(status=status, body=orjson.dumps(body))


def refusal(shed: Shed) -> errors.ServingError:
    """The error that a refusal of the core stands for."""
    detail = shed.detail
    wait = shed.retry_after
    match shed.reason:
        case Reason.UNKNOWN_MODEL:
            return errors.UnknownModel(
                detail or "no such model; GET /v1/models lists those served", param="model"
            )
        case Reason.FORBIDDEN:
            return errors.ModelForbidden(detail or "this key may not use the model", param="model")
        case Reason.CONTEXT:
            return errors.ContextTooLong(
                detail or "prompt and answer fit no replica's context; shorten one of them",
                param="messages",
            )
        case Reason.PROMPT_LIMIT:
            return errors.PayloadTooLarge(
                detail or "the prompt is longer than this key allows", param="messages"
            )
        case Reason.RATE:
            return errors.RateLimited(
                detail or "rate limit of this key reached", retry_after=_at_least(wait)
            )
        case Reason.CONCURRENCY:
            return errors.RateLimited(
                detail or "too many requests of this key at once", retry_after=_at_least(wait)
            )
        case Reason.QUOTA:
            return errors.QuotaExhausted(
                detail or "daily quota of this key used up", retry_after=wait
            )
        case Reason.QUEUE_FULL:
            return errors.QueueFull(detail or "the queue is full", retry_after=_at_least(wait))
        case Reason.OVERLOAD:
            return errors.DeadlineUnreachable(
                detail or "overloaded: requests of this class are refused for now",
                retry_after=_at_least(wait),
            )
        case Reason.UNREACHABLE:
            return errors.DeadlineUnreachable(
                detail or "no replica can meet this request's limits now",
                retry_after=_at_least(wait),
            )
        case Reason.EXPIRED:
            return errors.DeadlineExpired(
                detail or "no replica became free in time", retry_after=_at_least(wait)
            )
        case Reason.NO_REPLICA:
            return errors.NoReplica(
                detail or "no replica that serves the model is up", retry_after=_at_least(wait)
            )
        case Reason.UPSTREAM:
            return errors.BackendUnavailable(detail or "the replica failed before its first byte")
        case Reason.SHUTTING_DOWN:
            return errors.ShuttingDown(
                detail or "the gateway is shutting down", retry_after=_at_least(wait)
            )


def _at_least(wait: float | None) -> float:
    """Every 429 and 503 tells when to come back; a second where nothing better is known."""
    return 1.0 if wait is None else wait
