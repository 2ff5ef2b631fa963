"""`x-ratelimit-*` headers in OpenAI's forms, for clients whose tenant has limits.

Source of the forms: OpenAI API reference, "Rate limits in headers"; resets are durations such as
`20ms`, `1s` or `6m0s`.
"""

from __future__ import annotations

import math

from policies.bucket import Standing


def limit_headers(standing: Standing) -> bytes:
    """Encoded lines; empty where nothing is limited."""
    requests = _lines(
        "requests", standing.limit_requests, standing.remaining_requests, standing.reset_requests
    )
    tokens = _lines(
        "tokens", standing.limit_tokens, standing.remaining_tokens, standing.reset_tokens
    )
    return (requests + tokens).encode()


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them; never shorter than it is."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"


def _lines(what: str, limit: float | None, left: float | None, reset: float | None) -> str:
    if limit is None:
        return ""
    rest = "" if left is None else f"x-ratelimit-remaining-{what}: {int(left)}\r\n"
    last = "" if reset is None else f"x-ratelimit-reset-{what}: {duration(reset)}\r\n"
    return f"x-ratelimit-limit-{what}: {int(limit)}\r\n{rest}{last}"
