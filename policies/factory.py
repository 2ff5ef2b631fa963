"""From policy configuration to scorer and decision core; the one place that knows every kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pydantic import TypeAdapter

from domain.events import (
    Action,
    Arrived,
    AttemptEnded,
    Commit,
    Committed,
    FirstToken,
    Progress,
    Reading,
    Send,
    TrialChanged,
)
from domain.fleet import FleetSpec, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.ports import Estimator, Scorer
from domain.request import AUTO, InferenceRequest, Slo, SloClass, Tenant
from policies import registry
from policies.config import ActorPolicy, BestFitPolicy, PlainBase, PolicyConfig, TrialConfig
from policies.core import DecisionCore
from policies.options import CoreOptions
from policies.rollout import PlannedTrial, TrialPlan


@lru_cache(maxsize=1)
def _shipped() -> ActorPolicy:
    policy = registry.read_entry(registry.SHIPPED, "actor").policy
    assert isinstance(policy, ActorPolicy)
    return policy


def resolved(config: PolicyConfig) -> PolicyConfig:
    """The policy with everything in it that its configuration leaves to the package: the shipped
    weights. Raises: EntryError if they are damaged.
    """
    if config.kind != "actor" or config.weights is not None:
        return config
    own = {name: getattr(config, name) for name in config.model_fields_set - {"weights"}}
    return _shipped().model_copy(update=own)


def build_scorer(config: PolicyConfig | PlainBase) -> Scorer:
    """The scorer of that kind; imports only its module."""
    if config.kind == "actor":
        config = resolved(config)
    match config.kind:
        case "best_fit":
            from policies.scorers.best_fit import best_fit

            return best_fit(config.ttft_margin, config.tpot_margin, config.e2e_margin)
        case "lmetric":
            from policies.scorers.lmetric import LMETRIC

            return LMETRIC
        case "prefix_affinity":
            from policies.scorers.prefix import prefix_affinity

            return prefix_affinity(config.prefix, config.queue, config.memory)
        case "sticky":
            from policies.scorers.prefix import sticky

            return sticky(
                config.saturated_ms / 1000.0, config.session, prefill_bound=config.prefill_bound
            )
        case "predicted":
            from policies.scorers.predicted import predicted

            return predicted(config.ttft, config.decode)
        case "just_enough":
            from policies.scorers.just_enough import just_enough

            return just_enough(config.margin)
        case "pools":
            from policies.scorers.pools import POOLS

            return POOLS
        case "marginal" | "actor" | "network":
            from policies.scorers.marginal import MarginalParams, marginal

            rule = MarginalParams(
                loss=config.loss,
                price=config.price,
                sharpness=config.sharpness,
                least_left=config.least_left_tokens,
                foreign_tpot=config.foreign_tpot_ms / 1000.0,
                size=config.size,
                hold_above=config.hold_above,
                hold_until=config.hold_until if config.hold else 0.0,
            )
            if config.kind == "marginal":
                return marginal(rule)
            if config.kind == "network":
                from policies.scorers.network import network

                layers = None if config.layers is None else config.layers.model_dump()
                return network(layers, rule, config.reach, config.ranges())
            from policies.scorers.actor import actor

            found = config.weights or {}
            weights = {str(k): {str(z): w for z, w in v.items()} for k, v in found.items()}
            held = {str(z): w for z, w in config.hold_more.items()}
            return actor(weights, held, rule, config.reach, config.ranges())
        case "cheapest":
            from policies.scorers.cheapest import CHEAPEST

            return CHEAPEST
        case "linear":
            from policies.scorers.linear import linear

            flat = {str(name): weight for name, weight in config.weights.items()}
            return linear(flat, config.within, config.ranges())
        case "bandit":
            from policies.scorers.bandit import bandit

            return bandit(
                config.mode,
                alpha=config.alpha,
                budget=config.budget,
                price=config.price,
                forgetting=config.forgetting,
                ridge=config.ridge,
                envelope=config.ranges(),
            )
        case "drift_plus_penalty":
            from policies.scorers.drift_plus_penalty import VirtualQueue, drift_plus_penalty

            def queues(name: str) -> dict[int, VirtualQueue]:
                found = ((t.rank, getattr(t, name)) for t in config.targets)
                return {
                    rank: VirtualQueue(goal, config.cap, config.leak, config.rest)
                    for rank, goal in found
                    if goal is not None
                }

            return drift_plus_penalty(
                build_scorer(config.base),
                v=config.v,
                attainment=queues("attainment"),
                quality=queues("quality"),
            )
        case kind:
            from policies.scorers import classic

            return {
                "random": classic.RANDOM,
                "round_robin": classic.ROUND_ROBIN,
                "weighted_round_robin": classic.WEIGHTED_ROUND_ROBIN,
                "least_requests": classic.LEAST_REQUESTS,
                "least_tokens": classic.LEAST_TOKENS,
                "power_of_two": classic.POWER_OF_TWO,
            }[kind]


def build_core(
    config: PolicyConfig,
    *,
    fleet: FleetSpec,
    estimator: Estimator,
    tenants: Sequence[Tenant],
    classes: Sequence[SloClass],
    now: float = 0.0,
    midnight: float = 0.0,
) -> DecisionCore:
    """A fresh decision core; gateway and training both start here.

    `now` is the shell's clock, `midnight` any UTC midnight on it: daily quotas begin there. The
    fallback policy is best-fit with its defaults.
    """
    config = resolved(config)
    return DecisionCore(
        fleet=fleet,
        estimator=estimator,
        scorer=build_scorer(config),
        fallback=build_scorer(BestFitPolicy()),
        tenants=tenants,
        classes=classes,
        options=core_options(config),
        now=now,
        midnight=midnight,
        policies=policy_of,
        policy=config.model_dump_json(),
        trials=trial_of,
    )


def core_options(config: PolicyConfig) -> CoreOptions:
    """How a core decides around that policy's scorer."""
    config = resolved(config)
    return CoreOptions(
        hold=config.hold,
        shed_below=config.shed_below,
        overload_target=config.overload_target,
        explore=config.explore,
        explore_within=config.explore_within,
        max_attempts=config.max_attempts,
        retry_share=config.retry_share,
        queue_limit=config.queue_limit,
        fairness=config.fairness,
        alpha_max=config.alpha_max,
        candidates=config.log_candidates,
        warm_wait=config.warm_wait,
        warm_wait_min=config.warm_wait_min_ms / 1000.0,
        seed=config.seed,
    )


def policy_of(text: str) -> tuple[Scorer, CoreOptions]:
    """Scorer and options of a policy's configuration as JSON."""
    config: PolicyConfig = TypeAdapter(PolicyConfig).validate_json(text)
    return build_scorer(config), core_options(config)


def trial_of(text: str) -> PlannedTrial:
    """A trial of its configuration as JSON."""
    config = TrialConfig.model_validate_json(text)
    policy = resolved(config.policy)
    return PlannedTrial(
        plan=TrialPlan(**config.model_dump(exclude={"policy"})),
        config=policy.model_dump_json(),
        scorer=build_scorer(policy),
        options=core_options(policy),
    )


def warm(config: PolicyConfig, estimator: Estimator, *, trial: bool = False) -> None:
    """Compile, or load from the cache, every kernel that a core of this kind calls; seconds when
    cold.

    Runs a few requests through a core and a fleet of its own (the compiled code depends on
    neither); `estimator` should be one of its own too, since it learns from them. `trial`: also
    what trying the policy beside another takes.
    """
    fleet = FleetSpec(
        replicas=(ReplicaSpec(name="a", variant="v"), ReplicaSpec(name="b", variant="v")),
        variants=(Variant(name="v", model="m"),),
    )
    core = build_core(
        config,
        fleet=fleet,
        estimator=estimator,
        tenants=[Tenant(name="warm")],
        classes=[SloClass(name="standard", rank=1)],
    )
    now = 0.0
    if trial:
        core.handle(TrialChanged(now, TrialConfig(name="warm", policy=config).model_dump_json()))
    slo = Slo(ttft=10.0, tpot=1.0, e2e=1e6)  # type: ignore[arg-type] # seconds
    count = 2 * len(fleet.replicas) + 2
    sends: list[Send] = []
    for i in range(count):
        now += 1e-3
        request = InferenceRequest(
            id=str(i), tenant="warm", model=AUTO, prompt_tokens=8.0, max_tokens=8.0, slo=slo, tie=i
        )
        sends += _committed(core, core.handle(Arrived(now, request)), now)
    core.handle(Reading(now, 0, now, 1.0, 0.0, 0.1))
    while sends:
        send = sends.pop(0)
        now += 1e-3
        sends += _committed(core, core.handle(FirstToken(now, send.id, send.attempt)), now)
        core.handle(Progress(now, (send.replica,), (send.slot,), (2,)))
        end = AttemptEnded(
            now,
            send.id,
            send.attempt,
            Cause.FINISHED,
            Usage(prompt=8, completion=2, source=UsageSource.COUNTED),
            now,
        )
        sends += _committed(core, core.handle(end), now)


def _committed(core: DecisionCore, actions: list[Action], now: float) -> list[Send]:
    """Answer every Commit with yes and collect what is sent."""
    sends: list[Send] = []
    pending = list(actions)
    while pending:
        action = pending.pop(0)
        if isinstance(action, Commit) and action.route is not None:
            pending += core.handle(Committed(now, action.id, action.attempt))
        elif isinstance(action, Send):
            sends.append(action)
    return sends
