"""Do the intervals of `training.ope` hold the truth? Fifty policies: judged by a log, then run.

    python -m training.ope_study [--policies 50] [--logs 10] [--requests 60000] [--json]

A run in the simulator with `explore: 0.03` writes each log: the live core's own records, as a
gateway writes them. Each of fifty `linear` policies with random weights, kept to routes whose
P(SLO) is within 0.02 of the best as exploration is, is judged from that log and then run itself on
other requests of the same scenario. Rewards: `good`, whether the answer is good enough (harder
prompts fail more, more so on coarser variants), and `cost`, the route's price for the work. Neither
depends on the queue; what does is which routes are nearly best, so the load is light.

Policies judged by one log share its luck: if a route happened to be explored too rarely there, all
that prefer it are off together, and coverage says little. So they are dealt to several logs.

The truth of a policy is the mean over its own run. Each run takes the log's first requests, and
what it gives beyond what the log's policy gave *them* is added to what that policy gave all: so the
truth's own noise is that of paired differences, small beside the intervals.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from domain.events import Action, Event, Send, Settle
from domain.records import decision_record
from policies.config import LinearPolicy
from policies.factory import build_core
from training.evaluate import estimator_for
from training.ope import (
    OUTPUT_WEIGHT,
    Floats,
    Ints,
    Record,
    collect,
    evaluate,
    explored,
    linear_target,
    parted,
)
from training.scenario import Arrivals, Case, Promise, Replicas, Scenario, VariantQuality, build
from training.traces import rows
from training.virtual import VirtualShell

WITHIN = 0.02
RATE = 0.7
"""Requests/s: so few that one replica alone would carry them, whichever a policy prefers. At 14/s
its own queue changes what a policy may choose, and intervals hold the truth far less often."""


def scenario(requests: int) -> Scenario:
    """Four variants of one model at four prices, limits that every replica can meet."""
    return Scenario(
        name="ope",
        fleet=(
            Replicas(profile="h100-bf16-14b", count=2, variant="bf16"),
            Replicas(profile="h100-fp8-14b", count=1, variant="fp8"),
            Replicas(profile="a100-bf16-14b", count=1, variant="a100"),
            Replicas(profile="l40s-int4-14b", count=1, variant="int4"),
        ),
        variants={
            "bf16": VariantQuality(quality=0.9),
            "fp8": VariantQuality(quality=0.86),
            "a100": VariantQuality(quality=0.8),
            "int4": VariantQuality(quality=0.65),
        },
        arrivals=Arrivals(kind="poisson"),
        classes={"standard": Promise(rank=1, ttft=4.0, tpot=0.2)},
        requests=requests,
        warmup=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a run gave: mean reward by name, with its standard error."""

    means: dict[str, float]
    errors: dict[str, float]


def chance_good(case: Case, route: Any) -> Floats:
    """P(good enough) of every request on its route, (n,): hard prompts tell variants apart."""
    hard = np.minimum(np.log1p(case.trace.prompt.astype(np.float64)) / np.log1p(8000.0), 1.0)
    prior = np.array([case.fleet.variants[_variant(case, r)].quality for r in range(_routes(case))])
    chance: Floats = np.clip(1.0 - (1.0 - prior[route]) * (0.4 + 1.2 * hard), 0.0, 1.0)
    return chance


def cost(case: Case, route: Any) -> Floats:
    """Price of the work of every request on its route, (n,)."""
    price = np.array([r.profile.price for r in case.fleet.replicas])
    work = case.trace.prompt + OUTPUT_WEIGHT * case.trace.output
    return np.asarray(price[route] * work / 1000.0, np.float64)


def _variant(case: Case, replica: int) -> int:
    names = [v.name for v in case.fleet.variants]
    return names.index(case.fleet.replicas[replica].variant)


def _routes(case: Case) -> int:
    return len(case.fleet.replicas)


def policy(weights: dict[str, float], **options: Any) -> LinearPolicy:
    """A linear policy near the best P(SLO), nothing shed."""
    return LinearPolicy.model_validate(
        {"kind": "linear", "weights": weights, "within": WITHIN, "log_candidates": 0} | options
    )


def live(case: Case, config: LinearPolicy, listener: Any = None) -> Any:
    """A run of the live core with frozen predictions; its `training.measures.Run`."""
    core = build_core(
        config.model_copy(update={"seed": case.core_seed(config.seed)}),
        fleet=case.believed,
        estimator=estimator_for(case, learning=False),
        tenants=case.tenants,
        classes=case.classes,
    )
    return VirtualShell(case, [core], listener).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A run with exploration: its decision records, and the route of every request, (n,)."""

    records: Sequence[Record]
    place: Ints


def logged(case: Case, explore: float) -> Logged:
    """The decision records of one run with exploration, rewards drawn once a request."""
    sends: dict[str, Send] = {}
    outcomes: list[Any] = []

    def listen(_event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                sends[action.id] = action
            elif isinstance(action, Settle):
                outcomes.append(action.outcome)

    # The log's policy takes the fastest of the nearly equal ones.
    live(case, policy({"p_slo": 1.0, "e2e": -0.05}, explore=explore, log_candidates=8), listen)
    names = tuple(r.name for r in case.fleet.replicas)
    variants = tuple(v.name for v in case.fleet.variants)
    draws = np.random.default_rng([case.seed, 77]).random(len(case.trace))
    place = np.zeros(len(case.trace), np.int64)
    for outcome in outcomes:
        place[int(outcome.request.id)] = outcome.route or 0
    good, spent = chance_good(case, place), cost(case, place)
    records = []
    for outcome in outcomes:
        i = int(outcome.request.id)
        send = sends.get(outcome.request.id)
        record = decision_record(
            outcome,
            send.candidates if send is not None else (),
            replicas=names,
            variants=variants,
            routes=names,
            wall_offset=0.0,
        )
        rewards = {"good": float(draws[i] < good[i]), "cost": float(spent[i])}
        records.append(record | {"rewards": rewards})
    return Logged(records=records, place=place)


def first(case: Case, count: int) -> Case:
    """The case with its first requests only."""
    trace = rows(case.trace, np.arange(count))
    limits = {name: getattr(case, name)[:count] for name in ("ttft", "tpot", "e2e")}
    return replace(case, trace=trace, **limits)


def truth(whole: Case, part: Case, place: Ints, weights: dict[str, float]) -> Told:
    """What the policy gives when it decides itself; the labels' noise is averaged out. `place` are
    the routes of the log's policy.
    """
    run, count = live(part, policy(weights)), len(part.trace)
    means, errors = {}, {}
    for name, reward in (("good", chance_good), ("cost", cost)):
        more = reward(part, run.replica) - reward(part, place[:count])
        means[name] = float(reward(whole, place).mean() + more.mean())
        errors[name] = float(more.std() / np.sqrt(count))
    return Told(means=means, errors=errors)


def targets(count: int, seed: int) -> list[dict[str, float]]:
    """Random weights; the scale of each trait is about that of its differences between routes."""
    rng = np.random.default_rng([seed, 5])
    scale = {"p_slo": 5.0, "quality": 1.0, "ttft": 2.0, "e2e": 0.2, "tpot_share": 2.0}
    return [
        {name: round(float(s * rng.normal()), 4) for name, s in scale.items()} for _ in range(count)
    ]


def main() -> None:
    """Run the study and print how often the truth lay within."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--policies", type=int, default=50)
    parser.add_argument("--logs", type=int, default=10, help="logs that the policies are dealt to")
    parser.add_argument("--requests", type=int, default=60_000, help="of each log")
    parser.add_argument(
        "--truth", type=int, default=4_000, help="requests of each policy's own run"
    )
    parser.add_argument("--explore", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    began = time.process_time()
    found: list[dict[str, Any]] = []
    wanted = targets(args.policies, args.seed)
    for k in range(args.logs):
        case = build(scenario(args.requests), RATE, args.seed + k)
        written = logged(case, args.explore)
        log = collect(written.records)
        part = first(case, args.truth)
        for number in range(k, args.policies, args.logs):
            weights = wanted[number]
            target = linear_target(log, weights, WITHIN)
            told = truth(case, part, written.place, weights)
            for reward in ("good", "cost"):
                for e in evaluate(log, target, reward, seed=number):
                    mean, error = told.means[reward], told.errors[reward]
                    found.append(
                        {
                            "policy": number, "log": k, "reward": reward, "method": e.method,
                            "truth": mean, "truth_error": error, "value": e.value, "low": e.low,
                            "high": e.high, "ess": e.ess, "mean_weight": e.mean_weight,
                            "explored": explored(log, target), "parted": parted(log, target),
                            "refused": e.refused is not None, "inside": e.low <= mean <= e.high,
                        }
                    )  # fmt: skip
        if not args.json:
            print(
                f"log {k + 1}: {len(log)} decisions, {time.process_time() - began:.0f} CPU-s",
                flush=True,
            )
    if args.json:
        print(json.dumps(found))
    else:
        print(table(found))


def table(found: list[dict[str, Any]]) -> str:
    """How often the interval held the truth, how wide it was, by reward and method."""
    noise = np.median([r["truth_error"] / r["truth"] for r in found])
    lines = ["reward  method   inside        refused  width/|truth|  ESS median [least, most]"]
    for reward in ("good", "cost"):
        for method in ("ips", "snips", "dr", "switch"):
            mine = [r for r in found if r["reward"] == reward and r["method"] == method]
            kept = [r for r in mine if not r["refused"]]
            inside = sum(r["inside"] for r in kept)
            width = np.median([(r["high"] - r["low"]) / abs(r["truth"]) for r in kept or mine])
            ess = [r["ess"] for r in kept or mine]
            lines.append(
                f"{reward:<7} {method:<7} {inside:>3} of {len(kept):<3} "
                f"{100 * inside / max(len(kept), 1):>4.0f} %  {len(mine) - len(kept):>6}  "
                f"{width:>12.3f}  {np.median(ess):>8.0f} [{min(ess):.0f}, {max(ess):.0f}]"
            )
    lines.append(f"standard error of a truth: {100 * noise:.2f} % of it (median)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
