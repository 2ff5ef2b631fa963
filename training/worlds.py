"""Worlds that a policy is trained in: scenarios with everything uncertain about them drawn anew.

A template scenario gives workload and promises; drawn are the fleet (how many replicas of which of
the template's kinds), what the gateway believes of their constants, how old its readings are, how
good its length forecasts, how bursty arrivals, how many requests are urgent, and the number of
gateways. Rates are multiples of the world's own knee under the rule that training starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from domain.fleet import FleetSpec, Profile
from policies.config import PolicyConfig
from training.evaluate import Runner, climb, guess
from training.measures import fair, measure
from training.scenario import Case, Pools, Replicas, Scenario, Source, build

TIMES = (
    "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention", "experts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What is drawn; pairs are the ends of a uniform draw, `constants` of a log-uniform one.

    `constants`: a replica's true time over what the gateway believes, each time its own factor.
    `prompt` and `output`: median tokens, log-uniform, of log-normal lengths instead of the
    template's. `delay` (s) of readings. `sigma`: spread of the log of (forecast / true length).
    `cv` of the times between arrivals. `urgent`: share of the first class. `sizes`: replicas of a
    fleet. `plain`: chance that each of fleet, constants, lengths, delay, forecasts, arrivals and
    mix is left as the template has it. `gateways`: chance of two of them (through the live core, so
    one load only).
    """

    constants: tuple[float, float] = (0.7, 1.4)
    prompt: tuple[float, float] = (150.0, 3000.0)
    output: tuple[float, float] = (40.0, 1000.0)
    delay: tuple[float, float] = (0.0, 1.0)
    sigma: tuple[float, float] = (0.1, 1.0)
    cv: tuple[float, float] = (1.0, 4.0)
    urgent: tuple[float, float] = (0.25, 0.75)
    sizes: tuple[int, ...] = (4, 8)
    plain: float = 0.5
    gateways: float = 0.04
    requests: int = 1500
    live_requests: int = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A drawn scenario, the seed of what its gateway believes (None: the truth), and its knee in
    requests/s.
    """

    scenario: Scenario
    skew: int | None
    constants: tuple[float, float]
    knee: float = 1.0


def draw(template: Scenario, ranges: Ranges, rng: np.random.Generator) -> World:
    """One world, without its knee."""

    def uniform(pair: tuple[float, float]) -> float:
        return float(rng.uniform(*pair))

    def log_uniform(pair: tuple[float, float]) -> float:
        return float(np.exp(rng.uniform(*np.log(pair))))

    def leave() -> bool:
        return bool(rng.random() < ranges.plain)

    changes: dict[str, Any] = {"requests": ranges.requests, "warmup": 200}
    if not leave():
        changes["fleet"] = _fleet(template.fleet, int(rng.choice(ranges.sizes)), rng)
    if not leave():
        lengths = {
            "prompt_median": log_uniform(ranges.prompt),
            "output_median": log_uniform(ranges.output),
            "prompt_sigma": 1.0,
            "output_sigma": 1.0,
            "max_output": 6000.0,
        }
        changes["workload"] = (Source(options=lengths),)
    if not leave():
        delay = uniform(ranges.delay)
        changes["metrics"] = template.metrics.model_copy(update={"delay": delay})
    if not leave():
        changes["length_sigma"] = uniform(ranges.sigma)
    if not leave() and template.arrivals.kind == "gamma":
        changes["arrivals"] = template.arrivals.model_copy(update={"cv": uniform(ranges.cv)})
    if not leave():
        share = uniform(ranges.urgent)
        first, *others = template.classes.items()
        total = sum(c.share for _, c in others) or 1.0
        rest = {n: c.model_copy(update={"share": (1 - share) * c.share / total}) for n, c in others}
        changes["classes"] = {first[0]: first[1].model_copy(update={"share": share}), **rest}
    if rng.random() < ranges.gateways:
        changes |= {"gateways": 2, "requests": ranges.live_requests}
    skew = None if leave() else int(rng.integers(1 << 31))
    return World(
        scenario=template.model_copy(update=changes), skew=skew, constants=ranges.constants
    )


def _fleet(groups: Sequence[Replicas], size: int, rng: np.random.Generator) -> tuple[Replicas, ...]:
    """`size` replicas of the template's kinds in random parts. Every variant keeps one, so that no
    quality floor is out of reach.
    """
    counts = np.zeros(len(groups), np.int64)
    for variant in sorted({g.variant for g in groups}):
        mine = [k for k, g in enumerate(groups) if g.variant == variant]
        counts[int(rng.choice(mine))] = 1
    parts = rng.dirichlet(np.ones(len(groups)))
    counts += rng.multinomial(max(size - int(counts.sum()), 0), parts)
    return tuple(
        g.model_copy(update={"count": int(n)}) for g, n in zip(groups, counts, strict=True) if n
    )


def case_of(
    world: World, rate: float, seed: int, pools: Pools, profiles: Mapping[str, Profile]
) -> Case:
    """A case of the world; the gateway's beliefs are the world's, the requests the seed's."""
    case = build(world.scenario, rate, seed, profiles=profiles, pools=pools)
    if world.skew is None:
        return case
    return replace(case, believed=_skewed(case.fleet, world))


def _skewed(fleet: FleetSpec, world: World) -> FleetSpec:
    rng = np.random.default_rng(world.skew)
    low, high = np.log(world.constants)
    replicas = []
    for spec in fleet.replicas:
        factors = np.exp(rng.uniform(low, high, len(TIMES)))
        believed = {
            name: getattr(spec.profile, name) / float(f)
            for name, f in zip(TIMES, factors, strict=True)
        }
        replicas.append(replace(spec, profile=replace(spec.profile, **believed)))
    return replace(fleet, replicas=tuple(replicas))


def with_knee(
    world: World,
    rule: PolicyConfig,
    runner: Runner,
    pools: Pools,
    profiles: Mapping[str, Profile],
    seed: int,
) -> World:
    """The world with its knee: where the rule, at one gateway, stops meeting 90 %, size-fair, on
    requests of one seed.
    """
    single = replace(world, scenario=world.scenario.model_copy(update={"gateways": 1}))

    def met(rate: float) -> list[float]:
        case = case_of(single, rate, seed, pools, profiles)
        return [fair(measure(case, runner.run(case, rule)[0], rule.kind))]

    start = 0.5 * guess(case_of(single, 1.0, seed, pools, profiles))
    return replace(world, knee=climb(met, start, rungs=14).rates[0])
