"""Sections of the config file that the gateway reads. Values only; nothing here opens anything."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from domain.fleet import Profile, ProfileKey, Variant
from domain.request import Slo, SloClass
from domain.units import Probability, Seconds, SecondsPerToken, seconds_from_ms

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the config: cannot change, and takes no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(Section):
    """Where the gateway listens. A change needs a restart."""

    host: str = "127.0.0.1"  # reachable from outside only when somebody says so
    port: Annotated[int, Field(ge=0, le=65535)] = 8080  # 0 takes any free port
    workers: Annotated[int, Field(ge=1)] = 1  # processes on that port; more than one need a store
    body_limit_kb: Annotated[int, Field(ge=1)] = 32_768  # a few images; prompts end near 1 MiB
    admin_key_hash: str | None = None  # `sluice key` prints it; None: /admin from this machine only
    drain_ms: NotNegative = 10_000  # running streams may finish for so long after SIGTERM


class ProfileConfig(Section):
    """How fast a replica is (`domain.fleet.Profile`); what is left out is a middling guess.

    Learned scales correct it while it serves, so an order of magnitude is enough to start.
    """

    gpu: str = "unknown"
    precision: str = "unknown"
    overhead_ms: NotNegative | None = None
    weights_ms: NotNegative | None = None
    per_sequence_us: NotNegative | None = None
    per_context_ns: NotNegative | None = None
    per_token_us: Positive | None = None
    per_attention_ns: NotNegative | None = None
    experts_ms: NotNegative | None = None
    expert_tokens: Positive | None = None  # of a step, that touch half of the experts
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    max_seqs: Annotated[int, Field(ge=1)] | None = None
    kv_capacity_tokens: Annotated[float, Field(ge=1)] | None = None
    max_context_tokens: Annotated[int, Field(ge=1)] | None = None
    price: NotNegative = 1.0  # of one busy second, in any one currency
    power_watts: NotNegative = 400.0  # one data-centre GPU under load
    uncertainty: Positive | None = None

    def profile(
        self,
        *,
        engine: str,
        model: str,
        max_seqs: int | None = None,
        max_context: int | None = None,
        kv_capacity: float | None = None,
    ) -> Profile:
        """The profile; the config wins over what the engine told (the arguments)."""
        start = Profile()
        context = self.max_context_tokens or max_context or start.max_context
        seqs = self.max_seqs or max_seqs or start.max_seqs
        return Profile(
            key=ProfileKey(gpu=self.gpu, engine=engine, model=model, precision=self.precision),
            overhead=_scaled(self.overhead_ms, 1e-3, start.overhead),
            weights=_scaled(self.weights_ms, 1e-3, start.weights),
            per_sequence=_scaled(self.per_sequence_us, 1e-6, start.per_sequence),
            per_context=_scaled(self.per_context_ns, 1e-9, start.per_context),
            per_token=_scaled(self.per_token_us, 1e-6, start.per_token),
            per_attention=_scaled(self.per_attention_ns, 1e-9, start.per_attention),
            experts=_scaled(self.experts_ms, 1e-3, start.experts),
            expert_tokens=self.expert_tokens or start.expert_tokens,
            chunk=self.chunk_tokens or start.chunk,
            max_seqs=seqs,
            kv_capacity=self.kv_capacity_tokens or kv_capacity or start.kv_capacity,
            max_context=context,
            price=self.price,
            power=self.power_watts,
            uncertainty=self.uncertainty or start.uncertainty,
        )


class ReplicaSection(Section):
    """What every replica has; `variant` names an entry under `models`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    variant: str
    weight: Positive = 1.0  # share under weighted round robin
    window_ms: Positive = 50.0  # prefill backlog it is given (CORE section 3.9)
    profile: ProfileConfig = ProfileConfig()


class UrlReplica(ReplicaSection):
    """An engine that somebody else runs. `engine: auto` asks it who it is."""

    kind: Literal["url"] = "url"
    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+[^\s]*$")]
    engine: Literal["auto", "llamacpp", "vllm", "openai"] = "auto"
    served_model: str | None = None  # the name it goes by there; None takes the first it lists
    api_key_env: str | None = None  # variable that holds the engine's own key

    @field_validator("url")
    @classmethod
    def _without_secrets(cls, url: str) -> str:
        if urlsplit(url).username is not None:
            raise ValueError("must hold no user or password; api_key_env names the key's variable")
        return url

    def api_key(self) -> str | None:
        """The engine's key, from the environment."""
        return os.environ.get(self.api_key_env) or None if self.api_key_env else None


class LocalReplicaConfig(ReplicaSection):
    """A llama.cpp child process of the gateway itself, with SmolLM2-135M on one thread."""

    kind: Literal["local"]
    precision: Literal["f16", "q8_0", "q4_0"]
    slots: Annotated[int, Field(ge=1)] = 4  # more streams on one core are slower than reading
    context: Annotated[int, Field(ge=256)] = 2048  # tokens a slot
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0 takes any free port


ReplicaConfig = Annotated[UrlReplica | LocalReplicaConfig, Field(discriminator="kind")]


class VariantConfig(Section):
    """One way to run a model."""

    quality: Share | None = None  # P(answer good enough); None: measured (local), else 0.9
    price_per_token: NotNegative = 0.0
    note: str = ""

    def variant(self, name: str, model: str, measured: float | None = None) -> Variant:
        """The variant, with the measured quality where the config names none."""
        quality = self.quality if self.quality is not None else measured
        return Variant(
            name=name,
            model=model,
            quality=0.9 if quality is None else quality,
            price_per_token=self.price_per_token,
            note=self.note,
        )


class ModelConfig(Section):
    """A name that clients ask for, and the variants it stands for, best quality first."""

    variants: Annotated[dict[str, VariantConfig], Field(min_length=1)]


class ClassConfig(Section):
    """A service class; absent limits are not promised. Rank 0 is shed last."""

    rank: Annotated[int, Field(ge=0)] = 0
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None
    quality: Share | None = None
    weight: Positive = 1.0  # what one met request is worth
    sheddable: bool = True  # refuse early instead of serving late
    patience_ms: Positive = 10_000  # ageing bound: then it claims the next room for itself
    max_wait_ms: Positive = 120_000  # longest stay in the queue; SDKs give up after minutes
    chain_ms: Positive | None = None  # one deadline for all steps of an `x-session-id`

    def slo_class(self, name: str) -> SloClass:
        """The class in seconds."""
        return SloClass(
            name=name,
            rank=self.rank,
            slo=Slo(
                ttft=_seconds(self.ttft_ms),
                tpot=None if self.tpot_ms is None else SecondsPerToken(self.tpot_ms / 1000),
                e2e=_seconds(self.e2e_ms),
                quality=None if self.quality is None else Probability(self.quality),
            ),
            weight=self.weight,
            sheddable=self.sheddable,
            patience=seconds_from_ms(self.patience_ms),
            max_wait=seconds_from_ms(self.max_wait_ms),
            chain=_seconds(self.chain_ms),
        )


class TimeoutsConfig(Section):
    """Limits of one attempt at a replica."""

    connect_ms: Positive = 2_000  # a replica in the same network answers within milliseconds
    first_token_ms: Positive = 120_000  # the longest prompts of a laptop fleet
    between_tokens_ms: Positive = 60_000  # an engine that preempts may pause for long
    total_ms: Positive = 900_000  # the longest answers, at a slow pace


class MonitorConfig(Section):
    """How replicas are watched."""

    every_ms: Positive = 500  # the staleness that the default policy was chosen under
    timeout_ms: Positive = 2_000  # a busy engine answers late; a reading older than this is no news
    down_after: Annotated[int, Field(ge=1)] = 3  # refused polls in a row; one may be chance
    silence_ms: Positive = 15_000  # no answer at all for so long: hung, not only busy


class BreakerConfig(Section):
    """When a replica that fails requests is left alone, and for how long."""

    failures: Annotated[int, Field(ge=1)] = 3  # in a row; one may be chance
    pause_ms: Positive = 1_000  # doubled with every failed probe
    longest_pause_ms: Positive = 30_000


class LogsConfig(Section):
    """Where decisions and events are written. A change needs a restart."""

    decisions: Path | None = Path(".sluice/decisions.jsonl")
    max_mb: Positive = 64  # of one file; five of them hold about half a million decisions
    keep: Annotated[int, Field(ge=0)] = 4
    events: Path | None = None  # every event of the core, to live a run through again; off


class MemoryStoreConfig(Section):
    """One gateway alone: its own books are the whole truth."""

    kind: Literal["memory"] = "memory"


class RedisStoreConfig(Section):
    """Several gateways over one Redis or Valkey; the URL comes from the environment."""

    kind: Literal["redis"]
    url_env: str = "SLUICE_REDIS_URL"  # redis://[user:password@]host:port[/db], or rediss://
    gateway: str | None = None  # this gateway's name, unique; None: host name and process id
    prefix: str = "sluice"  # of every key, so that fleets can share a server
    lease_ms: Positive = 15_000  # a dead gateway's holds end after so long
    answer_timeout_ms: Positive = 100  # no answer for so long: decide on the local share

    def url(self) -> str | None:
        """Where the store is, from the environment."""
        return os.environ.get(self.url_env) or None

    def name(self) -> str:
        """What this gateway calls itself there."""
        return self.gateway or f"{socket.gethostname()}-{os.getpid()}"


StoreConfig = Annotated[MemoryStoreConfig | RedisStoreConfig, Field(discriminator="kind")]


def _seconds(ms: float | None) -> Seconds | None:
    return None if ms is None else seconds_from_ms(ms)


def _scaled(value: float | None, unit: float, default: float) -> float:
    return default if value is None else value * unit
