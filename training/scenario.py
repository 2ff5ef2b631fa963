"""Scenarios: a fleet, what comes to it, what was promised, and what goes wrong, as one YAML file.

`build` turns a scenario, a rate and a seed into a `Case`: everything a run needs, drawn once, so
that every policy meets the same requests (common random numbers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.request import AUTO, Slo, SloClass, Tenant
from domain.units import Seconds
from training.traces import (
    Floats,
    Trace,
    at_rate,
    burst,
    diurnal,
    drift,
    early,
    gamma_arrivals,
    late,
    merged,
    poisson,
    resampled,
    rows,
    scaled,
    sessions_at,
    shaped,
    synthetic,
    with_classes,
    with_tenants,
)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Replicas(_Section):
    """`count` equal replicas of a shipped profile; `change` overrides fields of it."""

    profile: str
    count: Annotated[int, Field(ge=1)] = 1
    variant: str = "model"
    phase: Literal["both", "prefill", "decode"] = "both"
    weight: Positive | None = None  # share under weighted round robin; None: by decode speed
    window: Positive = 0.05  # s of prefill backlog (CORE section 3.9)
    pool_low: NotNegative = 0.0  # tokens
    pool_high: Positive = float("inf")
    change: dict[str, float] = {}


class VariantQuality(_Section):
    """A way to run a model."""

    model: str = "model"
    quality: Annotated[float, Field(ge=0, le=1)] = 0.9


class Source(_Section):
    """One part of the workload: a data set (`training.trace_sources`) or `synthetic`.

    `share` is of the requests; lengths are divided and capped before.
    """

    trace: str = "synthetic"
    share: Positive = 1.0
    divide: Positive = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    options: dict[str, float] = {}  # of `training.traces.synthetic`
    seconds: Positive = 3600.0  # drawn of a generated mixture
    tenant: str | None = None  # its requests belong to this tenant
    promise: str | None = None  # its requests are of this class; None: by the classes' shares
    when: Literal["always", "early", "late"] = "always"  # most of it comes first, or last


class Arrivals(_Section):
    """`source` keeps the recorded times, stretched to the rate, and prefixes; sessions start at
    random and go on as their steps end. The others draw lengths anew.
    """

    kind: Literal["source", "poisson", "gamma"] = "gamma"
    cv: Positive = 2.0
    shape: Literal["flat", "diurnal", "drift", "burst"] = "flat"


class Promise(_Section):
    """A class: limits in seconds; `ttft_per_token` adds to `ttft` for every prompt token."""

    rank: Annotated[int, Field(ge=0)] = 0
    share: Positive = 1.0
    ttft: Positive | None = None
    ttft_per_token: NotNegative = 0.0
    tpot: Positive | None = None
    e2e: Positive | None = None
    quality: Annotated[float, Field(ge=0, le=1)] | None = None
    weight: Positive = 1.0
    sheddable: bool = True
    patience: Positive = 10.0
    max_wait: Positive = 120.0

    def slo(self, prompt: float) -> Slo:
        """Limits of one request of `prompt` tokens."""
        ttft = None if self.ttft is None else Seconds(self.ttft + self.ttft_per_token * prompt)
        return Slo(ttft=ttft, tpot=self.tpot, e2e=self.e2e, quality=self.quality)  # type: ignore[arg-type]


class Metrics(_Section):
    """What the monitor sees: each replica is read `every` s and known `delay` s later."""

    every: Positive = 0.5
    delay: NotNegative = 0.0


class Failure(_Section):
    """A replica (by index) dies at a share of the trace, and serves again `down` s later."""

    replica: Annotated[int, Field(ge=0)]
    at: Annotated[float, Field(ge=0, le=1)]
    down: Positive = 30.0
    noticed: NotNegative = 1.0  # s until the gateway knows


class Changes(_Section):
    """What may be done to the fleet while it serves, and what it costs (`backends.sim.actions`)."""

    warm_up: NotNegative = 60.0  # s until a started engine serves
    flip: NotNegative = 2.0  # s to change a replica's phase
    down: tuple[int, ...] = ()  # replicas that are not started at first
    layouts: dict[str, Annotated[int, Field(ge=1)]] = {}  # profiles to choose of, and their GPUs


class Scenario(_Section):
    """One file under `configs/scenarios`."""

    name: str
    about: str = ""
    fleet: Annotated[tuple[Replicas, ...], Field(min_length=1)]
    variants: dict[str, VariantQuality] = {"model": VariantQuality()}
    workload: Annotated[tuple[Source, ...], Field(min_length=1)] = (Source(),)
    arrivals: Arrivals = Arrivals()
    classes: Annotated[dict[str, Promise], Field(min_length=1)]
    tenants: dict[str, float] = {"default": 1.0}
    metrics: Metrics = Metrics()
    gateways: Annotated[int, Field(ge=1)] = 1
    failures: tuple[Failure, ...] = ()
    changes: Changes = Changes()
    requests: Annotated[int, Field(ge=1)] = 6000
    warmup: Annotated[int, Field(ge=0)] = 300
    length_sigma: NotNegative | None = 0.6  # forecast = truth x log-normal; None: learned only
    constants_error: NotNegative = 0.0  # the gateway's constants are off by up to this share
    loads: tuple[Positive, ...] = ()  # of a comparison, times the knee; empty: the comparison's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A scenario at one rate and seed. `fleet` is the truth, `believed` what the gateway thinks.

    `ttft`, `tpot`, `e2e` (n,) are the limits of each request in seconds, inf where none.
    """

    scenario: Scenario
    rate: float
    seed: int
    trace: Trace
    fleet: FleetSpec
    believed: FleetSpec
    classes: tuple[SloClass, ...]
    tenants: tuple[Tenant, ...]
    ttft: Floats
    tpot: Floats
    e2e: Floats
    model: str = AUTO

    def core_seed(self, seed: int, gateway: int = 0) -> int:
        """Seed of one gateway's core, for a policy with this seed."""
        return seed + 1000 * self.seed + gateway

    def slo(self, i: int) -> Slo:
        """Limits of request i."""
        promise = self.scenario.classes[self.trace.classes[self.trace.class_id[i]]]
        return promise.slo(float(self.trace.prompt[i]))


def read(path: Path) -> Scenario:
    """A scenario file. `base: other.yaml` takes what is not said from another file beside it, whole
    sections at a time. Raises: ConfigError naming what is wrong.
    """
    try:
        return Scenario.model_validate(_fields(path))
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc
    except (ValidationError, yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _fields(path: Path, depth: int = 0) -> dict[str, Any]:
    """Sections of a file over those of its base. Raises: ValueError for a circle or a list."""
    fields = yaml.safe_load(path.read_text())
    if not isinstance(fields, dict):
        raise ValueError("a scenario is a mapping")  # noqa: TRY004 - a bad file, not a bug
    base = fields.pop("base", None)
    if base is None:
        return fields
    if depth > 8:
        raise ValueError(f"base {base!r} leads back to this file")
    return {**_fields(path.parent / str(base), depth + 1), **fields}


class Pools:
    """Data sets to draw from, each read once; `data` is their folder."""

    def __init__(self, data: Path | None = None) -> None:
        self._data = data
        self._known: dict[tuple[Any, ...], Trace] = {}

    def of(self, source: Source) -> Trace:
        """Every row of a source, lengths divided and capped.

        Generated mixtures are drawn with one seed: seeds of cases differ in the rows they take.
        """
        key = (source.trace, source.seconds, source.divide, source.max_prompt, source.max_output)
        if key not in self._known:
            from training.trace_sources import default_data, load

            data = self._data or default_data()
            pool = load(source.trace, data, np.random.default_rng(0), seconds=source.seconds)
            self._known[key] = scaled(
                pool,
                divide=source.divide,
                max_prompt=source.max_prompt,
                max_output=source.max_output,
            )
        return self._known[key]


def build(
    scenario: Scenario,
    rate: float,
    seed: int,
    *,
    data: Path | None = None,
    profiles: Mapping[str, Profile] | None = None,
    pools: Pools | None = None,
) -> Case:
    """The case of a scenario at a rate (requests/s).

    `pools` keeps data sets between calls; without it they are read from `data`.
    Raises: ConfigError for an unknown profile.
    """
    known = load_profiles(shipped()) if profiles is None else profiles
    fleet = _fleet(scenario, known)
    rng = np.random.default_rng([seed, 1])
    trace = _workload(scenario, rate, rng, Pools(data) if pools is None else pools)
    trace = _classed(scenario, trace, np.random.default_rng([seed, 2]))
    if trace.tenants == ("default",) or scenario.tenants != {"default": 1.0}:
        trace = with_tenants(trace, scenario.tenants, np.random.default_rng([seed, 3]))
    limits = [promise.slo(0.0) for promise in scenario.classes.values()]
    per_token = np.array([promise.ttft_per_token for promise in scenario.classes.values()])

    def limit(values: list[Any]) -> Floats:
        return np.array([np.inf if v is None else v for v in values])[trace.class_id]

    return Case(
        scenario=scenario,
        rate=rate,
        seed=seed,
        trace=trace,
        fleet=fleet,
        believed=_believed(fleet, scenario.constants_error, np.random.default_rng([seed, 4])),
        classes=tuple(
            SloClass(
                name=name,
                rank=promise.rank,
                slo=promise.slo(0.0),
                weight=promise.weight,
                sheddable=promise.sheddable,
                patience=Seconds(promise.patience),
                max_wait=Seconds(promise.max_wait),
            )
            for name, promise in scenario.classes.items()
        ),
        tenants=tuple(Tenant(name=name) for name in trace.tenants),
        ttft=limit([slo.ttft for slo in limits]) + per_token[trace.class_id] * trace.prompt,
        tpot=limit([slo.tpot for slo in limits]),
        e2e=limit([slo.e2e for slo in limits]),
    )


def _fleet(scenario: Scenario, profiles: Mapping[str, Profile]) -> FleetSpec:
    replicas: list[ReplicaSpec] = []
    for group in scenario.fleet:
        if group.profile not in profiles:
            raise ConfigError(
                f"scenario {scenario.name!r}: unknown profile {group.profile!r}; known: "
                f"{', '.join(sorted(profiles))}"
            )
        whole = {"chunk", "max_seqs", "max_context"}
        change = {k: int(v) if k in whole else v for k, v in group.change.items()}
        profile = replace(profiles[group.profile], **change)  # type: ignore[arg-type]
        fixed = profile.overhead + profile.experts * 32 / (32 + profile.expert_tokens)
        speed = 1.0 / (fixed + profile.weights + 32 * profile.per_sequence)
        replicas += [
            ReplicaSpec(
                name=f"{group.profile}-{len(replicas) + k}",
                variant=group.variant,
                profile=profile,
                phase=group.phase,
                weight=speed if group.weight is None else group.weight,
                window=Seconds(group.window),
                pool_low=group.pool_low,
                pool_high=group.pool_high,
            )
            for k in range(group.count)
        ]
    variants = tuple(
        Variant(name=name, model=v.model, quality=v.quality)
        for name, v in scenario.variants.items()
    )
    return FleetSpec(replicas=tuple(replicas), variants=variants)


def _believed(fleet: FleetSpec, error: float, rng: np.random.Generator) -> FleetSpec:
    """The fleet with each replica's times off by one factor in [1 - error, 1 + error]."""
    if error == 0.0:
        return fleet
    times = (
        "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention",
        "experts",
    )  # fmt: skip
    replicas = []
    for spec in fleet.replicas:
        factors = rng.uniform(1.0 - error, 1.0 + error, len(times))
        wrong = {
            n: getattr(spec.profile, n) * float(f) for n, f in zip(times, factors, strict=True)
        }
        replicas.append(replace(spec, profile=replace(spec.profile, **wrong)))
    return replace(fleet, replicas=tuple(replicas))


def _workload(scenario: Scenario, rate: float, rng: np.random.Generator, pools: Pools) -> Trace:
    n, arrivals = scenario.requests, scenario.arrivals
    total = sum(source.share for source in scenario.workload)
    parts = []
    for source in scenario.workload:
        count = max(round(n * source.share / total), 1)
        part = _part(source, arrivals, count, rate * source.share / total, rng, pools)
        if source.when != "always":
            part = shaped(part, early() if source.when == "early" else late())
        if source.tenant is not None:
            part = with_tenants(part, {source.tenant: 1.0}, rng)
        if source.promise is not None:
            part = with_classes(part, {source.promise: 1.0}, rng)
        parts.append(part)
    trace = parts[0] if len(parts) == 1 else merged(parts)
    match arrivals.shape:
        case "diurnal":
            return shaped(trace, diurnal())
        case "drift":
            return shaped(trace, drift())
        case "burst":
            return shaped(trace, burst())
        case "flat":
            return trace


def _classed(scenario: Scenario, trace: Trace, rng: np.random.Generator) -> Trace:
    """The trace with its classes, in the scenario's order: drawn, but where a source names one.

    Raises: ConfigError for a name that is no class.
    """
    names, before = tuple(scenario.classes), trace.classes
    drawn = with_classes(trace, {name: p.share for name, p in scenario.classes.items()}, rng)
    promised = {s.promise for s in scenario.workload if s.promise is not None}
    if promised - set(names):
        known = ", ".join(sorted(names))
        raise ConfigError(
            f"scenario {scenario.name!r}: unknown promise {min(promised - set(names))!r}; "
            f"known: {known}"
        )
    if not promised:
        return drawn
    place = np.array([names.index(c) if c in promised else -1 for c in before], np.int64)
    own = place[trace.class_id]
    return replace(drawn, class_id=np.where(own < 0, drawn.class_id, own))


def _part(
    source: Source,
    arrivals: Arrivals,
    count: int,
    rate: float,
    rng: np.random.Generator,
    pools: Pools,
) -> Trace:
    """About `count` requests of one source at `rate`; recorded ones from a random place on."""
    if source.trace == "synthetic":
        pool = synthetic(count, 1.0, rng, **source.options)  # type: ignore[arg-type]
    else:
        pool = pools.of(source)
    if arrivals.kind == "source":
        if not pool.roots.all():
            return sessions_at(pool, count, rate, rng)
        start = int(rng.integers(0, max(len(pool) - count, 0) + 1))
        return at_rate(rows(pool, np.arange(start, min(start + count, len(pool)))), rate)
    if arrivals.kind == "poisson":
        return resampled(pool, poisson(count, rate, rng), rng)
    return resampled(pool, gamma_arrivals(count, rate, arrivals.cv, rng), rng)
