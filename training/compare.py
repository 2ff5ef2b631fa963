"""A grid of policies x scenarios x loads x seeds, cell by cell, kept as it goes.

Every policy of a (scenario, load, seed) meets the same requests. Loads are multiples of the best
classic heuristic's knee in that scenario, which is found first, on seeds of its own. A finished
cell is a line in `cells.jsonl`; a later call takes from there what it needs and runs the rest. A
cell is known by the scenario, the fleet's profiles and the policy, not by the code: start an empty
folder when the simulator has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from domain.fleet import Profile
from policies import registry
from policies.config import PolicyConfig
from policies.factory import resolved
from training.evaluate import policy_named
from training.measures import Report
from training.scenario import Scenario
from training.workers import Entrant, Knee, Unit, Yardstick, results

LOADS = (0.15, 0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.35, 1.6)
KNEE_POLICIES = ("best_fit", "just_enough", "predicted", "lmetric")
"""The classic heuristics that were ever best; the knee is the largest of theirs. It only places the
grid, so one seed and wide rungs do.
"""
BASELINES = (
    "random", "round_robin", "weighted_round_robin", "least_requests", "least_tokens",
    "power_of_two", "prefix_affinity", "sticky", "lmetric", "predicted", "best_fit", "just_enough",
    "pools",
)  # fmt: skip
"""DESIGN section 6. `pools` has one pool where a scenario sets no bands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    scenario: str
    policy: str
    load: float
    seed: int
    report: Report
    live: bool
    """Through the live core, because the compiled loop does not know all that it needs."""


def entrants(words: Sequence[str]) -> list[Entrant]:
    """Policies from words: a kind, `kind:option=value:...`, `label=kind:...`, `all`, a YAML file of
    labels to {kind, options}, or `label=FILE.json`, an entry of a registry. Early refusal is off
    unless asked for, so that all refuse by the same rules. Raises: ConfigError.
    """
    found: dict[str, PolicyConfig] = {}
    for word in words:
        if word == "all":
            found |= {kind: policy_of(kind, {}) for kind in (*BASELINES, "marginal")}
        elif word.endswith((".yaml", ".yml")):
            found |= _policy_file(Path(word))
        elif word.endswith(".json"):
            label, _, path = word.rpartition("=")
            policy = registry.read_file(Path(path)).policy
            found[label or Path(path).stem] = _bare(policy)
        else:
            name, *options = word.split(":")
            label, _, kind = name.rpartition("=")
            pairs = dict(option.partition("=")[::2] for option in options)
            values = {k: yaml.safe_load(v) for k, v in pairs.items()}
            found[label or word] = policy_of(kind, values)
    return [Entrant(label=label, policy=policy) for label, policy in found.items()]


def policy_of(kind: str, options: Mapping[str, Any]) -> PolicyConfig:
    """A policy by name; it refuses early only if its options say so. Raises: ConfigError."""
    return _bare(policy_named(kind, **options))


def _bare(policy: PolicyConfig) -> PolicyConfig:
    """A learned set scorer with its weights, as it was trained: without the guard rail around it,
    which the compiled loop does not know.
    """
    policy = resolved(policy)
    if policy.kind not in ("actor", "network"):
        return policy
    return policy.model_copy(update={"envelope": {}, "log_candidates": 0})


def _policy_file(path: Path) -> dict[str, PolicyConfig]:
    try:
        rows = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if not isinstance(rows, dict):
        raise ConfigError(f"{path}: a policy file maps labels to {{kind: ..., option: ...}}")
    return {
        str(label): policy_of(options["kind"], {k: v for k, v in options.items() if k != "kind"})
        for label, options in rows.items()
    }


STRONG = {
    "marginal": policy_of("marginal", {}),
    "marginal by work": policy_of("marginal", {"size": 1.0}),
}
"""Rules that the look-ahead plays with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: `requests` on `seeds` of a case that the compiled loop knows, `live_requests` on
    the first `live_seeds` (None: all) of others.
    """

    scenarios: tuple[Scenario, ...]
    entrants: tuple[Entrant, ...]
    loads: tuple[float, ...] = LOADS
    seeds: tuple[int, ...] = tuple(range(1, 21))
    live_seeds: int | None = None
    requests: int | None = None
    live_requests: int | None = None

    def sized(self, scenario: Scenario) -> Scenario:
        """The scenario with as many requests as the plan says."""
        count = self.live_requests if needs_live_core(scenario) else self.requests
        return scenario if count is None else scenario.model_copy(update={"requests": count})

    def seeds_of(self, scenario: Scenario) -> tuple[int, ...]:
        """The seeds on which a scenario is run."""
        return self.seeds[: self.live_seeds] if needs_live_core(scenario) else self.seeds


def needs_live_core(scenario: Scenario) -> bool:
    """Whether runs are expected to go through the live core (`fast_path.supports` decides)."""
    return (
        scenario.gateways > 1
        or bool(scenario.failures)
        or scenario.length_sigma is None
        or (
            scenario.arrivals.kind == "source"
            and any(s.trace in {"agents", "mooncake", "sharegpt"} for s in scenario.workload)
        )
    )


class Store:
    """Finished cells and knees of a folder; every one is written when it is known."""

    def __init__(self, folder: Path, profiles: Mapping[str, Profile]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "cells.jsonl"
        self._profiles = profiles
        self._known: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the last line of a run that was killed
                self._known[row["key"]] = row

    def key(self, unit: Unit, entrant: Entrant | None) -> str:
        """What a cell is known by."""
        used = {g.profile: repr(self._profiles.get(g.profile)) for g in unit.scenario.fleet}
        what = [
            unit.scenario.model_dump(
                exclude={"loads", "about"}, exclude_defaults=True, mode="json"
            ),
            used,
            unit.seed,
            unit.rate,
            [
                [e.policy.kind, e.policy.model_dump(exclude_defaults=True, mode="json")]
                for e in (unit.entrants if entrant is None else (entrant,))
            ],
            entrant is None,
            *(["yardstick"] if unit.yardstick else []),
        ]
        return blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """What was kept under a key."""
        return self._known.get(key)

    def put(self, key: str, row: dict[str, Any]) -> None:
        """Keep it."""
        self._known[key] = row
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, **row}) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All cells of a plan and the knee of each scenario, by name."""

    knees: Mapping[str, Knee]
    cells: Sequence[Cell]
    yardsticks: Sequence[Yardstick] = ()


Advance = Callable[[int, int, str], None]
"""Told how many cells are done of how many, and what was last."""


def execute(
    plan: Plan,
    folder: Path,
    *,
    data: Path | None = None,
    profiles: Path | None = None,
    jobs: int = 1,
    ray: str | None = None,
    yardstick_seeds: int = 0,
    advance: Advance = lambda _done, _all, _what: None,
) -> Outcome:
    """Run what the folder does not hold yet and return everything; yardsticks on the first
    `yardstick_seeds` seeds.
    """
    profiles = shipped() if profiles is None else profiles
    store = Store(folder, load_profiles(profiles))
    where: dict[str, Any] = {"data": data, "profiles": profiles, "jobs": jobs, "ray": ray}
    scenarios = [plan.sized(s) for s in plan.scenarios]
    knees = _knees(scenarios, store, where, advance)
    rows: list[tuple[str, dict[str, Any]]] = []
    missing: list[Unit] = []
    left = 0
    for scenario in scenarios:
        for load in scenario.loads or plan.loads:
            for seed in plan.seeds_of(scenario):
                unit = Unit(
                    scenario=scenario,
                    entrants=plan.entrants,
                    seed=seed,
                    load=load,
                    rate=load * knees[scenario.name].rate,
                )
                absent = tuple(e for e in plan.entrants if store.get(store.key(unit, e)) is None)
                rows += [(store.key(unit, e), {"label": e.label}) for e in plan.entrants]
                if absent:
                    left += len(absent)
                    missing.append(replace(unit, entrants=absent))
    total, done = len(rows), len(rows) - left
    missing.sort(key=lambda unit: unit.seed)  # whole seeds first, so that a cut run is of use
    for unit, result in results(missing, **where):
        assert isinstance(result, list)
        by_label = {e.label: e for e in unit.entrants}
        for label, live, report in result:
            kept = {
                "scenario": unit.scenario.name,
                "load": unit.load,
                "live": live,
                "report": asdict(report),
            }
            store.put(store.key(unit, by_label[label]), kept)
        done += len(result)
        advance(done, total, f"{unit.scenario.name} {unit.load:g} x knee")
    units = [
        Unit(
            scenario=scenario,
            entrants=tuple(Entrant(label=k, policy=p) for k, p in STRONG.items()),
            seed=seed,
            load=load,
            rate=load * knees[scenario.name].rate,
            yardstick=True,
        )
        for scenario in scenarios
        for load in scenario.loads or plan.loads
        for seed in plan.seeds_of(scenario)[:yardstick_seeds]
    ]
    return Outcome(
        knees=knees,
        cells=[_cell(store, key, row["label"]) for key, row in rows],
        yardsticks=_yardsticks(units, store, where, advance),
    )


def _yardsticks(
    units: Sequence[Unit], store: Store, where: Mapping[str, Any], advance: Advance
) -> list[Yardstick]:
    missing = [unit for unit in units if store.get(store.key(unit, None)) is None]
    missing.sort(key=lambda unit: unit.seed)
    for done, (unit, found) in enumerate(results(missing, **where), 1):
        assert isinstance(found, Yardstick)
        store.put(store.key(unit, None), {"yardstick": asdict(found)})
        advance(done, len(missing), f"yardsticks of {unit.scenario.name}")
    kept = []
    for unit in units:
        row = store.get(store.key(unit, None))
        assert row is not None
        fields = row["yardstick"]
        kept.append(Yardstick(**{**fields, "look_ahead": Report(**fields["look_ahead"])}))
    return kept


def _cell(store: Store, key: str, label: str) -> Cell:
    row = store.get(key)
    assert row is not None
    return Cell(
        scenario=row["scenario"],
        policy=label,
        load=row["load"],
        seed=row["report"]["seed"],
        report=Report(**{**row["report"], "policy": label}),
        live=row["live"],
    )


def _knees(
    scenarios: Sequence[Scenario], store: Store, where: Mapping[str, Any], advance: Advance
) -> dict[str, Knee]:
    classic = tuple(Entrant(label=k, policy=policy_of(k, {})) for k in KNEE_POLICIES)
    units = {s.name: Unit(scenario=s, entrants=classic) for s in scenarios}
    keys = {name: store.key(unit, None) for name, unit in units.items()}
    missing = [unit for name, unit in units.items() if store.get(keys[name]) is None]
    for done, (unit, knee) in enumerate(results(missing, **where), 1):
        assert isinstance(knee, Knee)
        store.put(keys[unit.scenario.name], {"knee": asdict(knee)})
        advance(done, len(missing), f"knee of {unit.scenario.name}: {knee.rate:.1f}/s")
    found: dict[str, Knee] = {}
    for name, key in keys.items():
        row = store.get(key)
        assert row is not None
        found[name] = Knee(**row["knee"])
    return found
