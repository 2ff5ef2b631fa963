"""Characters to tokens: a ratio per engine model that corrects itself from every `usage` that comes
back.
"""

from __future__ import annotations

START_RATIO = 4.0
"""Characters a token before anything was seen (English text under byte-pair vocabularies)."""

TEMPLATE_TOKENS = 8.0
"""Tokens that a chat template adds before anything was seen."""

FORGET = 0.02
"""Weight of one new observation."""


class TokenRatio:
    """prompt tokens = template + characters / ratio, per model; both learned by damped recursive
    least squares.

    Deterministic: the same observations in the same order give the same estimates.
    """

    def __init__(self, start: float = START_RATIO, template: float = TEMPLATE_TOKENS) -> None:
        self._start = (template, 1.0 / start)
        self._state: dict[str, _Line] = {}

    def estimate(self, model: str, chars: int) -> float:
        """Whole prompt tokens of a prompt of so many characters, at least 1."""
        line = self._state.get(model)
        template, slope = self._start if line is None else (line.template, line.slope)
        return float(max(1, round(template + slope * chars)))

    def observe(self, model: str, chars: int, tokens: float) -> None:
        """Take in what the engine counted for a prompt of so many characters."""
        if chars <= 0 or tokens <= 0:
            return
        line = self._state.get(model)
        if line is None:
            line = self._state[model] = _Line(*self._start)
        line.observe(chars, tokens)


class _Line:
    """Recursive least squares of tokens on (1, chars) with exponential forgetting."""

    __slots__ = ("_p", "slope", "template")

    def __init__(self, template: float, slope: float) -> None:
        self.template = template
        self.slope = slope
        # Prior covariance: the template is known to about 20 tokens, the slope to about 0.1.
        self._p = (400.0, 0.0, 0.01)

    def observe(self, chars: int, tokens: float) -> None:
        p00, p01, p11 = self._p
        x = float(chars)
        noise = 25.0 + (0.05 * tokens) ** 2
        g0, g1 = p00 + p01 * x, p01 + p11 * x
        denominator = noise + g0 + g1 * x
        k0, k1 = g0 / denominator, g1 / denominator
        error = tokens - self.template - self.slope * x
        self.template += k0 * error
        self.slope = min(max(self.slope + k1 * error, 0.02), 2.0)
        keep = 1.0 - FORGET / 4
        self._p = (
            min((p00 - k0 * g0) / keep, 400.0),
            (p01 - k0 * g1) / keep if p00 < 400.0 else p01 - k0 * g1,
            min((p11 - k1 * g1) / keep, 0.01),
        )
