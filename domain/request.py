"""What a client asks for, what was promised to it, and who asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from domain.units import Probability, Seconds, SecondsPerToken
from domain.values import dataclass

AUTO = "auto"
"""Model name that stands for every variant the tenant may use."""

BLOCK_TOKENS = 64
"""Estimated tokens covered by one prefix block hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits a request carries; None where nothing was promised.

    `ttft` and `tpot` count only for streamed requests (DESIGN section 11).
    """

    ttft: Seconds | None = None
    tpot: SecondsPerToken | None = None
    e2e: Seconds | None = None
    quality: Probability | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} limit must be above 0 seconds, not {value}")
        if self.quality is not None and not 0 <= self.quality <= 1:
            raise ValueError(f"quality floor must lie in [0, 1], not {self.quality}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """A named promise with its place in the order of shedding.

    `rank` 0 is the top class: shed last, never explored on. `weight` scales what one met request is
    worth to a scorer whose unit is `value`. `sheddable` classes may be refused when their limits
    cannot be met any more; others are held on.
    """

    name: str
    rank: int = 0
    slo: Slo = field(default_factory=Slo)
    weight: float = 1.0
    sheddable: bool = True
    patience: Seconds = Seconds(10.0)
    """How long a request without a deadline waits in the queue before it claims a replica's window
    (ageing bound)."""
    max_wait: Seconds = Seconds(120.0)
    """How long a request may stay queued at all."""
    chain: Seconds | None = None
    """One deadline for all requests of a session (an agent's steps), from the first one's arrival;
    each gets what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one account; None where there is none. `burst_tokens` is the bucket's depth."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst_tokens: float | None = None
    concurrency: int | None = None
    max_prompt_tokens: int | None = None
    daily_tokens: float | None = None
    daily_cost: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUsage:
    """What has been counted against one `Quota`; None where it has no such limit.

    `running` requests, admitted `requests_in_window`, tokens in the bucket (`level` of `burst`,
    below 0 in debt), tokens and cost since midnight UTC.
    """

    running: int
    requests_in_window: int | None
    level: float | None
    burst: float | None
    used_today: float | None
    cost_today: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who pays. `models` None means every model; `weight` is its share in the fair queue.

    `quota` bounds the tenant as a whole, `key_quotas` one of its API keys (by the key's name),
    `model_quotas` what it may use of one model (by the name that clients send).
    """

    name: str
    weight: float = 1.0
    class_name: str | None = None
    models: frozenset[str] | None = None
    quota: Quota = field(default_factory=Quota)
    key_quotas: Mapping[str, Quota] = field(default_factory=dict)
    model_quotas: Mapping[str, Quota] = field(default_factory=dict)
    isolate_cache: bool = False
    log_text: bool = False

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight of tenant {self.name!r} must be above 0, not {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One request as the decision core sees it; no text, no bytes.

    `prompt_tokens` is an estimate (characters over a learned ratio, or exact where a tokenizer is
    configured). `max_tokens` is None where the client set no limit. `tie` is a 31-bit hash of the
    id, so that two gateways break ties differently. `blocks` are chained hashes of
    `BLOCK_TOKENS`-token prefixes, longest last. `features` is the flat feature vector of
    `predictors.features` (float64), empty where no learned predictor is configured. `text_group`
    hashes (tenant, route, system prompt), the key of running quantiles.
    """

    id: str
    tenant: str
    model: str
    prompt_tokens: float
    max_tokens: float | None = None
    slo: Slo = field(default_factory=Slo)
    class_name: str = "standard"
    stream: bool = True
    choices: int = 1
    tie: int = 0
    key: str | None = None
    session: str | None = None
    blocks: tuple[int, ...] = ()
    features: tuple[float, ...] = ()
    text_group: int = 0
    prompt_chars: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens must not be negative, got {self.prompt_tokens}")
