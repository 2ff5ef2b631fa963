"""Units carried in types: seconds everywhere inside, milliseconds only at HTTP and config edges."""

from __future__ import annotations

from typing import NewType

Seconds = NewType("Seconds", float)
"""A duration, or a point on the shell's monotonic clock."""

SecondsPerToken = NewType("SecondsPerToken", float)
"""A pace. Never the same type as a time to first token."""

Tokens = NewType("Tokens", float)
"""A count of tokens; a float, since predictions are not whole."""

Probability = NewType("Probability", float)
"""A number between 0 and 1."""


def seconds_from_ms(milliseconds: float) -> Seconds:
    """Milliseconds of an HTTP header or config key, in seconds."""
    return Seconds(milliseconds / 1000.0)
