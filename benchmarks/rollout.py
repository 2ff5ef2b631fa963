"""What a bad candidate does before it is stopped, through the real decision core.

    python benchmarks/rollout.py [--seeds 5] [--draws 300] [--json]

Every row is a way for a candidate policy to be bad, tried as a canary beside best-fit; the columns
say what stopped it, how many of its requests that took (median and worst over the seeds), and
whether every request was settled exactly once with nothing left in the books.

refused   damaged and poisoned entries: never reach the core
poisoned  weights that give no numbers (in the core, past every check at the door)
shifted   prompts thirty times as long as those of the fit, from some request on
slow      every decision of the candidate beyond its budget, as the shell would report it
worse N   its requests miss their limits N points more often than the others' 5 %
equal     no difference: how many of the seeds are rolled back falsely (alpha is 1 %)

The last two are also drawn without the core, many more times, for the test alone.

Requests come one after another; whether a limit is missed is drawn by the driver, so that the
difference is exactly what the row says. A quarter of the tenants are canaries.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from domain.errors import ConfigError
from domain.events import (
    Action,
    Arrived,
    AttemptEnded,
    Commit,
    Committed,
    Event,
    FirstToken,
    RolledBack,
    ScorerLate,
    Send,
    Settle,
    TrialChanged,
)
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from policies import registry
from policies.config import BestFitPolicy, LinearPolicy
from policies.core import DecisionCore
from policies.factory import build_core
from policies.sequential import AttainmentTest
from predictors.estimator import BaselineEstimator

TENANTS = 200
SHARE = 0.25
BASE_MISS = 0.05
CANDIDATE = {"kind": "linear", "weights": {"p_slo": 1.0, "running": -0.1}, "shed_below": 0.0}
COUNTED = Usage(prompt=100, completion=8, source=UsageSource.COUNTED)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to be bad. `miss` is the candidate's chance to miss, `most` its requests at most."""

    name: str
    candidate: dict[str, object]
    miss: float = BASE_MISS
    most: int = 20_000
    poison: bool = False
    long_after: int | None = None
    slow: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of it: `by` None if it was never stopped; `canaries` requests of its tenants,
    `decided` those that it decided itself, by then.
    """

    by: str | None
    canaries: int
    decided: int
    nothing_lost: bool


class Driver:
    """Plays arrivals, engines and the store around one core, three requests in flight."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.chance = case, random.Random(seed)
        fleet = FleetSpec(
            replicas=tuple(
                ReplicaSpec(name=f"r{k}", variant="v", profile=Profile(weights=0.008 + 0.004 * k))
                for k in range(4)
            ),
            variants=(Variant(name="v", model="m", quality=0.9),),
        )
        self.core: DecisionCore = build_core(
            BestFitPolicy(shed_below=0.0, overload_target=0.0, log_candidates=0),
            fleet=fleet,
            estimator=BaselineEstimator(),
            tenants=[Tenant(name=f"t{k}") for k in range(TENANTS)],
            classes=[SloClass(name="standard", rank=1)],
        )
        self.now, self.arrived, self.settled, self.canaries, self.decided = 0.0, 0, 0, 0, 0
        self.rolled: list[RolledBack] = []
        self.sends: dict[str, Send] = {}
        self.running: deque[str] = deque()

    def run(self) -> Result:
        """Requests until the trial ends, or the most; then the rest to their ends."""
        case = self.case
        plan = {"name": case.name, "policy": case.candidate, "mode": "canary", "share": SHARE}
        self.tell(TrialChanged(0.0, json.dumps(plan | {"salt": str(self.chance.random())})))
        trial = self.core.trial
        if trial is None:
            raise RuntimeError("no trial")
        if case.poison:
            trial.scorer.params[:] = np.nan
        while not self.rolled and self.canaries < case.most:
            prompt = 100.0
            if case.long_after is not None and self.canaries >= case.long_after:
                prompt = 3000.0
            name, mine = self.arrive(prompt, trial.takes)
            if mine and self.sends[name].policy == trial.scorer.name:
                self.decided += 1
                if case.slow:
                    self.tell(ScorerLate(self.now, 0.08))
            self.running.append(name)
            if len(self.running) > 3:
                self.end(self.running.popleft(), trial.takes)
        while self.running:
            self.end(self.running.popleft(), trial.takes)
        left = self.core.columns.running.any() or self.core.columns.kv_used.any()
        return Result(
            by=self.rolled[0].reason if self.rolled else None,
            canaries=self.canaries,
            decided=self.decided,
            nothing_lost=self.settled == self.arrived and not self.core.open and not left,
        )

    def arrive(self, prompt: float, takes: Callable[[InferenceRequest], bool]) -> tuple[str, bool]:
        """One request; its name, and whether it is a canary's."""
        self.now += 0.01
        self.arrived += 1
        request = InferenceRequest(
            id=f"q{self.arrived}",
            tenant=f"t{self.chance.randrange(TENANTS)}",
            model="m",
            prompt_tokens=prompt,
            max_tokens=64.0,
            slo=Slo(e2e=20.0),  # type: ignore[arg-type] # seconds
            tie=self.chance.getrandbits(31),
        )
        mine = takes(request)
        self.canaries += mine
        self.tell(Arrived(self.now, request))
        return request.id, mine

    def end(self, name: str, takes: Callable[[InferenceRequest], bool]) -> None:
        """The request's answer, in time or not, as its side's chance says."""
        send = self.sends.pop(name)
        request = self.core.open[name].request
        late = self.chance.random() < (self.case.miss if takes(request) else BASE_MISS)
        self.now += 0.001
        self.tell(FirstToken(self.now, name, send.attempt))
        cause = Cause.INTERRUPTED if late else Cause.FINISHED
        self.tell(AttemptEnded(self.now, name, send.attempt, cause, COUNTED, self.now))

    def tell(self, event: Event) -> None:
        """Hand an event over and play the store."""
        pending: list[Action] = self.core.handle(event)
        while pending:
            action = pending.pop(0)
            match action:
                case Commit():
                    pending += self.core.handle(Committed(event.at, action.id, action.attempt))
                case Send():
                    self.sends[action.id] = action
                case Settle():
                    self.settled += 1
                case RolledBack():
                    self.rolled.append(action)
                case _:
                    pass


CASES = (
    Case(name="poisoned", candidate=CANDIDATE, poison=True),
    Case(
        name="shifted",
        candidate=CANDIDATE | {"envelope": {"cost": (0.0, 0.05)}},
        long_after=300,
    ),
    Case(name="slow", candidate=CANDIDATE, slow=True),
    Case(name="worse 95", candidate=CANDIDATE, miss=1.0),
    Case(name="worse 10", candidate=CANDIDATE, miss=BASE_MISS + 0.10),
    Case(name="worse 3", candidate=CANDIDATE, miss=BASE_MISS + 0.03, most=10_000),
    Case(name="equal", candidate=CANDIDATE, most=1_000),
)


def alone(miss: float, most: int, seed: int) -> int | None:
    """The test without a core: the candidate's requests until the alarm, None if there is none."""
    chance, test = random.Random(seed), AttainmentTest()
    while test.candidate < most:
        mine = chance.random() < SHARE
        met = chance.random() >= (miss if mine else BASE_MISS)
        test.observe(0, candidate=mine, met=met)
        if test.alarm:
            return test.candidate
    return None


def refused() -> dict[str, str]:
    """What becomes of entries that are damaged or poisoned at the door."""
    good = registry.entry_of("new", LinearPolicy.model_validate(CANDIDATE))
    text = json.dumps(good.model_dump(mode="json"))
    damage = {
        "a weight of NaN": text.replace('"p_slo": 1.0', '"p_slo": NaN'),
        "a weight of 1e300": text.replace('"p_slo": 1.0', '"p_slo": 1e300'),
        "a weight changed": text.replace('"p_slo": 1.0', '"p_slo": -1.0'),
        "cut short": text[: len(text) // 2],
        "another kind": text.replace('"kind": "linear"', '"kind": "pickle"'),
        "another name": text.replace('"name": "new"', '"name": "old"'),
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = registry.write_entry(Path(folder), good)
        for what, bad in damage.items():
            path.write_text(bad)
            try:
                registry.read_entry(Path(folder), "new")
                found[what] = "TAKEN"
            except ConfigError as exc:
                found[what] = str(exc).removeprefix(f"{path}: ")[:70]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if anything was lost or a bad candidate went on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=300, help="runs of the test alone")
    parser.add_argument("--cases", nargs="*", help="only these rows")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    at_door = refused()
    rows = []
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        began = time.process_time()
        results = [Driver(case, seed).run() for seed in range(args.seeds)]
        rows.append((case, results, time.process_time() - began))
    drawn = {
        "worse 3": [alone(BASE_MISS + 0.03, 10_000, seed) for seed in range(args.draws)],
        "equal": [alone(BASE_MISS, 10_000, seed) for seed in range(args.draws)],
    }
    if args.json:
        print(
            json.dumps(
                {
                    "refused": at_door,
                    "alone": drawn,
                    "cases": {c.name: [asdict(r) for r in results] for c, results, _ in rows},
                }
            )
        )
    else:
        for what, why in at_door.items():
            print(f"refused   {what:<18} {why}")
        print(
            "case       stopped  by        canary requests until then   decided itself  "
            "nothing lost   CPU-s"
        )
        for case, results, spent in rows:
            stopped = [r for r in results if r.by is not None]
            counts = [r.canaries - (case.long_after or 0) for r in stopped]
            reasons = ", ".join(sorted({str(r.by) for r in stopped})) or "-"
            span = f"median {median(counts):.0f}, most {max(counts)}" if counts else "-"
            print(
                f"{case.name:<10} {len(stopped):>2} of {len(results):<3} {reasons:<9} {span:<28} "
                f"{max(r.decided for r in results):>14}  "
                f"{all(r.nothing_lost for r in results)!s:<13} {spent:.1f}"
            )
        for name, found in drawn.items():
            stopped_at = sorted(c for c in found if c is not None)
            span = "-"
            if stopped_at:
                most = stopped_at[int(0.95 * (len(stopped_at) - 1))]
                span = f"median {median(stopped_at):.0f}, 95 % within {most}"
            print(f"{name:<10} {len(stopped_at)} of {len(found)} (test alone)  {span}")
    fine = all(r.nothing_lost for _, results, _ in rows for r in results)
    caught = all(
        r.by is not None for case, results, _ in rows for r in results if case.name != "equal"
    )
    return 0 if fine and caught and "TAKEN" not in at_door.values() else 1


if __name__ == "__main__":
    sys.exit(main())
