"""The engine's own count of tokens, read from the end of an answer."""

from __future__ import annotations

import re

import msgspec

from domain.outcome import Usage, UsageSource

_MAX_TOKENS = 1e9
"""A count above this is a mistake, not a usage."""

_TAIL = re.compile(rb'"usage"\s*:\s*(\{)')


class _Details(msgspec.Struct):
    cached_tokens: float | None = None
    reasoning_tokens: float | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Response | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def usage_of(body: bytes) -> Usage | None:
    """Usage in a JSON answer or event of any endpoint; None if there is none that makes sense.

    Counts are tokens. Negative or absurd counts are treated as absent.
    """
    try:
        answer = _decode_answer(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    found = answer.usage or (answer.response.usage if answer.response is not None else None)
    if found is None:
        return None
    prompt = found.prompt_tokens if found.prompt_tokens is not None else found.input_tokens
    completion = (
        found.completion_tokens if found.completion_tokens is not None else found.output_tokens
    )
    if prompt is None and completion is None:
        return None
    details = found.prompt_tokens_details or found.input_tokens_details
    prompt, completion = prompt or 0.0, completion or 0.0
    cached = (details.cached_tokens if details is not None else None) or 0.0
    if min(prompt, completion, cached) < 0 or max(prompt, completion, cached) > _MAX_TOKENS:
        return None
    parts = found.completion_tokens_details or found.output_tokens_details
    thinking = parts.reasoning_tokens if parts is not None else None
    if thinking is not None and not 0 <= thinking <= completion:
        thinking = None
    return Usage(
        prompt=prompt,
        completion=completion,
        cached=cached,
        thinking=thinking,
        source=UsageSource.ENGINE,
    )


def usage_in_tail(tail: bytes) -> Usage | None:
    """Usage from the last bytes of a JSON answer that was too long to keep.

    The last object called `usage` counts, if it is whole; the rest of the answer need not be.
    """
    starts = [match.start(1) for match in _TAIL.finditer(tail)]
    if not starts:
        return None
    depth = 0
    for at in range(starts[-1], len(tail)):
        depth += {123: 1, 125: -1}.get(tail[at], 0)  # braces; usage holds no strings with braces
        if depth == 0:
            return usage_of(b'{"usage":%b}' % tail[starts[-1] : at + 1])
    return None
