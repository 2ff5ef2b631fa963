"""The fleet: what a replica is, what it can do, and one row of the columns for people and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from domain.units import Seconds

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile was fitted for: GPU, engine, model, precision and parallel layout."""

    gpu: str = "unknown"
    engine: str = "openai"
    model: str = "unknown"
    precision: str = "unknown"
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How fast a replica is: the step time of continuous batching.

        step = overhead + per_sequence * batch + touched + max(memory, compute)
        touched = experts * tokens / (tokens + expert_tokens), tokens = batch + prefill
        memory = weights + per_context * sum(context)
        compute = per_token * tokens + per_attention * sum(new * (cached + new / 2))

    `batch` counts decoding sequences, `context` their resident tokens, `prefill` the new prompt
    tokens of the step. All times in seconds; `weights` is the time to read the weights once per
    step (bytes / bandwidth: N bytes, not 2 N). `experts` is the time to read what only some tokens
    need, the routed experts of a MoE, and `expert_tokens` how many tokens of a step touch half of
    it: routing is skewed, so that the share grows slower than 1 - (1 - k/E)^tokens. `chunk` is the
    prefill budget of one step in tokens, `kv_capacity` in tokens, `max_context` in tokens per
    sequence. `price` is per second of a busy replica, in any one currency; `power` in watts.

    What only the model of a replica knows (`backends.sim.replica`), all off by default:
    `per_uneven` in seconds per token by which sequences are shorter than the longest one, added to
    `memory`; speculation of `spec_tokens` drafted tokens, each accepted with chance
    `spec_acceptance`, in steps of at most `spec_batch` sequences, `spec_draft` seconds a drafted
    token (such a step has batch * (spec_tokens + 1) tokens beside the prefill); `lora_slots`
    adapters in memory, `lora_load` seconds to load one (0 slots: adapters cost nothing).
    Source: the roofline form of DESIGN section 5; the share of the experts is ours, fitted to step
    tables (docs/calibration.md).
    """

    key: ProfileKey = field(default_factory=ProfileKey)
    overhead: float = 0.002
    weights: float = 0.012
    per_sequence: float = 2.0e-5
    per_context: float = 8.0e-8
    per_token: float = 6.0e-5
    per_attention: float = 2.0e-9
    experts: float = 0.0
    expert_tokens: float = 1.0
    chunk: int = 1024
    max_seqs: int = 256
    kv_capacity: float = 200_000.0
    max_context: int = 8192
    price: float = 1.0
    power: float = 400.0
    uncertainty: float = 0.35
    """Standard deviation of the log of (actual / predicted) latency before anything was learned."""
    per_uneven: float = 0.0
    spec_tokens: int = 0
    spec_acceptance: float = 0.0
    spec_batch: int = 16
    spec_draft: float = 0.0
    lora_slots: int = 0
    lora_load: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "overhead", "weights", "per_sequence", "per_context", "per_attention", "experts",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 s or more, not {getattr(self, name)}")
        for name, unit in (("per_token", "s"), ("expert_tokens", "tokens")):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 {unit}, not {getattr(self, name)}")
        for name in ("per_uneven", "spec_tokens", "spec_draft", "lora_slots", "lora_load"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.spec_acceptance <= 1:
            raise ValueError(f"spec_acceptance is a chance, not {self.spec_acceptance}")
        if self.chunk < 1 or self.max_seqs < 1 or self.kv_capacity < 1 or self.max_context < 1:
            raise ValueError("chunk, max_seqs, kv_capacity and max_context must be at least 1")

    @classmethod
    def dense(
        cls,
        *,
        key: ProfileKey,
        parameters: float,
        bytes_per_parameter: float,
        layers: int,
        kv_heads: int,
        head_dim: int,
        heads: int,
        peak_flops: float,
        bandwidth: float,
        memory_bytes: float,
        compute_efficiency: float = 0.5,
        memory_efficiency: float = 0.75,
        kv_bytes: float = 2.0,
        overhead: float = 0.002,
        chunk: int = 1024,
        max_seqs: int = 256,
        max_context: int = 8192,
    ) -> Profile:
        """Profile of a plain dense decoder from its shape and the device's peaks.

        Units: FLOP/s, bytes/s, bytes. Weights are read once per step; a token costs 2 FLOPs per
        parameter; a pair of positions costs 4 FLOPs per head dimension, head and layer.
        """
        compute = peak_flops * compute_efficiency
        read = bandwidth * memory_efficiency
        weight_bytes = parameters * bytes_per_parameter
        kv_per_token = 2.0 * layers * kv_heads * head_dim * kv_bytes
        return cls(
            key=key,
            overhead=overhead,
            weights=weight_bytes / read,
            per_context=kv_per_token / read,
            per_token=2.0 * parameters / compute,
            per_attention=4.0 * layers * heads * head_dim / compute,
            chunk=chunk,
            max_seqs=max_seqs,
            kv_capacity=max(1.0, (0.9 * memory_bytes - weight_bytes) / kv_per_token),
            max_context=max_context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One running engine: a name, what it serves and how fast it is. `url` is empty in a
    simulation.

    `window` is the prefill backlog in seconds that the gateway lets it hold (CORE section 3.9).
    `pool` groups replicas by purpose; `pool_low` and `pool_high` bound the predicted total length
    (tokens) a length pool takes.
    """

    name: str
    variant: str
    profile: Profile = field(default_factory=Profile)
    url: str = ""
    engine_model: str = ""
    phase: Phase = "both"
    weight: float = 1.0
    window: Seconds = Seconds(0.05)
    pool: str = ""
    pool_low: float = 0.0
    pool_high: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a model (precision, engine, adapter) with its prior quality, P(answer good
    enough).
    """

    name: str
    model: str
    quality: float = 0.9
    price_per_token: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.quality <= 1:
            raise ValueError(
                f"quality of variant {self.name!r} must lie in [0, 1], not {self.quality}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica's state as a row, for people and tests; kernels read the columns."""

    name: str
    variant: str
    usable: bool
    running: float
    context: float
    backlog_tokens: float
    kv_used: float
    dispatched: float
    foreign_running: float
    foreign_context: float
    own_streams: int
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Replicas, the variants they run, and which variants a model name means, best quality
    first.
    """

    replicas: tuple[ReplicaSpec, ...]
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        names = [r.name for r in self.replicas]
        if len(set(names)) != len(names):
            raise ValueError(f"replica names must differ: {sorted(names)}")
        known = {v.name for v in self.variants}
        for replica in self.replicas:
            if replica.variant not in known:
                raise ValueError(
                    f"replica {replica.name!r} names unknown variant {replica.variant!r}; "
                    f"known: {sorted(known)}"
                )

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises: KeyError."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(name)

    @property
    def models(self) -> tuple[str, ...]:
        """Model names that a client may ask for, in the order of the variants."""
        return tuple(dict.fromkeys(v.model for v in self.variants))
