"""`x-ratelimit-*` headers in OpenAI's forms, for clients whose tenant has limits.

Source of the forms: OpenAI API reference, "Rate limits in headers"; resets are durations such as
`20ms`, `1s` or `6m0s`.
"""

from __future__ import annotations

import math

from policies.bucket import Standing


def limit_headers(standing: Standing) -> bytes:
    """Encoded lines; empty where nothing is limited."""
    pairs = (
        ("limit-requests", _count(standing.limit_requests)),
        ("remaining-requests", _count(standing.remaining_requests)),
        ("reset-requests", _given(standing.reset_requests, standing.limit_requests)),
        ("limit-tokens", _count(standing.limit_tokens)),
        ("remaining-tokens", _count(standing.remaining_tokens)),
        ("reset-tokens", _given(standing.reset_tokens, standing.limit_tokens)),
    )
    return "".join(
        f"x-ratelimit-{name}: {value}\r\n" for name, value in pairs if value is not None
    ).encode()


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


def _count(value: float | None) -> str | None:
    return None if value is None else str(int(value))


def _given(seconds: float | None, limit: float | None) -> str | None:
    return None if seconds is None or limit is None else duration(seconds)
