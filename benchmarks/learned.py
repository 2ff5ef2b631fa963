"""The learned set scorer: trained, shipped, and compared where it was not trained.

    python benchmarks/learned.py --jobs 2            24 CPU-minutes, then 40 for the comparison
    python benchmarks/learned.py --small --out X     everything once, with tiny budgets
    python benchmarks/learned.py --steps 2           the comparison of what is shipped

Both steps go on where they stopped (--out). Step 1 trains the scorer (`--minutes` of CPU) and tunes
two rules in the same worlds with the same budget; it writes policies/artifacts/entries/actor.json
and benchmarks/tuned/entries. Step 2 writes docs/learned.md, whose section "What it says" is written
by hand and kept. Rows of "trained on" are new seeds of the templates, all others are scenarios that
training never saw. In the former four ablations stand beside it.
"""

from __future__ import annotations

import argparse
import sys
from math import isnan
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import reading, told
from policies import registry
from policies.config import ActorPolicy, MarginalPolicy
from training import train_es
from training.compare import Entrant, Outcome, Plan, entrants, execute
from training.intervals import Interval
from training.scenario import Replicas, Scenario, read
from training.table import against

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("configs/scenarios")
TRAINED_ON = ("heterogeneous", "chat", "code", "homogeneous", "quality")
HELD_OUT = (
    "delay_500", "wrong_constants", "reasoning", "clients", "bursty", "diurnal", "drift", "flood",
)  # fmt: skip
LIVE = ("two_gateways", "two_gateways_500", "mooncake")
SIZES = {2: (1, 0, 1, 0), 6: (2, 2, 1, 1), 16: (6, 4, 4, 2), 32: (12, 8, 8, 4)}
"""Fleets of the heterogeneous scenario's kinds; trained on 4 and 8."""
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.3)
RULES = ("marginal", "best_fit_50=best_fit:ttft_margin=0.5:tpot_margin=0.5")
TUNED = ("marginal", "best_fit")
"""Rules that get as much CPU as training."""
OVER = (1.2, 1.5, 2.0, 3.0)
"""Loads of the starvation scenario."""


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generations", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=8.0, help="CPU-minutes, of each kind")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--live-seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--live-requests", type=int, default=1600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="2 generations, 2 seeds, 4 scenarios")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("learned-out"))
    parser.add_argument("--registry", type=Path, default=Path("policies/artifacts"))
    parser.add_argument("--tuned", type=Path, default=Path("benchmarks/tuned"))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    if args.small:
        args.generations, args.seeds, args.live_seeds, args.live_requests = 2, 2, 1, 300
        args.registry, args.docs = args.out / "policies", args.out
        args.tuned = args.out / "tuned"
    if 1 in args.steps:
        train(args)
    if 2 in args.steps:
        compare(args)
    return 0


def train(args: argparse.Namespace) -> None:
    """The artifact, and the tuned rules."""
    for kind, registry_ in (("actor", args.registry), *((k, args.tuned) for k in TUNED)):
        words = ["--scenario", *(str(FOLDER / f"{name}.yaml") for name in TRAINED_ON)]
        words += ["--kind", kind, "--generations", str(args.generations)]
        words += ["--jobs", str(args.jobs), "--minutes", str(args.minutes), "--every", "5"]
        words += ["--out", str(args.out / f"train-{kind}"), "--registry", str(registry_)]
        if args.small:
            words += ["--requests", "300", "--population", "6", "--every", "2"]
        if args.data is not None:
            words += ["--data", str(args.data)]
        train_es.main(words, told())


def compare(args: argparse.Namespace) -> None:
    """The artifact beside the rules."""
    if args.small and not (args.registry / "entries" / "actor.json").exists():
        args.registry = registry.SHIPPED
    path = args.registry / "entries" / "actor.json"
    whole = entrants([f"learned={path}"])[0]
    policy = whole.policy
    assert isinstance(policy, ActorPolicy)
    parts = [
        Entrant(label=label, policy=policy.model_copy(update=change))
        for label, change in (
            ("holding as the rule", {"hold_more": {}, "hold_above": MarginalPolicy().hold_above}),
            ("holding only", {"weights": {}}),
            ("never holds", {"hold_until": 0.0}),
            ("never sheds", {"shed_below": 0.0}),
        )
    ]
    files = {kind: args.tuned / "entries" / f"{kind}.json" for kind in TUNED}
    tuned = entrants([f"{kind} tuned={file}" for kind, file in files.items() if file.exists()])
    policies = [*entrants(list(RULES)), whole, *tuned, *parts]
    groups = [
        ("Trained on, new seeds", [shipped(args, name) for name in TRAINED_ON]),
        ("Never trained on", [shipped(args, name) for name in HELD_OUT]),
        ("Other fleet sizes, and a kind left out", sized(args)),
        ("Through the live core", [shipped(args, name) for name in LIVE]),
    ]
    if args.small:
        groups = [(title, some[:1]) for title, some in groups]
    lines = [
        "# The learned set scorer",
        "",
        (
            f"Made by `python benchmarks/learned.py`: {args.seeds} seeds of {args.requests} "
            f"requests a case ({args.live_seeds} of {args.live_requests} through the live core), "
            f"none of them used in training or tuning, which had {args.minutes:g} CPU-minutes each."
            " Simulation on `configs/profiles/estimated.yaml`; no "
            f"number is a measurement of a GPU. Entry `{registry.read_file(path).hash[:12]}`."
        ),
        "",
        *reading(args.docs / "learned.md"),
    ]
    for title, scenarios in groups:
        chosen = policies if title.startswith("Trained") else policies[: 3 + len(tuned)]
        found = run(args, scenarios, chosen, LOADS)
        lines += [f"## {title}", "", *table(found, scenarios, chosen), ""]
    flood = [shipped(args, "starvation")]
    found = run(args, flood, [*policies[:3], *entrants(["weighted_round_robin"])], OVER)
    lines += ["## More than the fleet carries", "", *attained(found), ""]
    args.docs.mkdir(exist_ok=True)
    (args.docs / "learned.md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


def shipped(args: argparse.Namespace, name: str) -> Scenario:
    """A scenario of the folder at this run's size."""
    scenario = read(ROOT / FOLDER / f"{name}.yaml")
    return scenario.model_copy(update={"requests": args.requests})


def sized(args: argparse.Namespace) -> list[Scenario]:
    """The heterogeneous scenario with other fleets; the last has no kind that training had."""
    base = shipped(args, "heterogeneous")
    found = []
    for size, counts in SIZES.items():
        fleet = tuple(
            g.model_copy(update={"count": n}) for g, n in zip(base.fleet, counts, strict=True) if n
        )
        about = f"{size} replicas"
        found.append(
            base.model_copy(update={"name": f"fleet of {size}", "fleet": fleet, "about": about})
        )
    # an A100 at INT4 is none of the profiles: weights come in less time, prefill takes more
    change = {"weights": 0.008, "per_token": 2.2e-4}
    other = Replicas(profile="a100-bf16-14b", count=4, variant="bf16", change=change)
    fleet = (base.fleet[0].model_copy(update={"count": 2}), other)
    found.append(base.model_copy(update={"name": "another kind", "fleet": fleet}))
    return found


def run(
    args: argparse.Namespace,
    scenarios: list[Scenario],
    policies: list[Entrant],
    loads: tuple[float, ...],
) -> Outcome:
    """Every cell of these."""
    plan = Plan(
        scenarios=tuple(s.model_copy(update={"loads": loads}) for s in scenarios),
        entrants=tuple(policies),
        loads=loads,
        seeds=tuple(range(1, args.seeds + 1)),
        live_seeds=args.live_seeds,
        live_requests=args.live_requests,
    )
    return execute(plan, args.out, data=args.data, jobs=args.jobs, advance=told())


def table(found: Outcome, scenarios: list[Scenario], policies: list[Entrant]) -> list[str]:
    """Size-fair goodput@90, and ratios to the rules at 90 and 99."""
    labels = [p.label for p in policies]
    heads = [*(f"{label} @90 /s" for label in labels[:3]), "x marginal", "x best_fit_50"]
    heads += ["@99 x marginal", *(f"{label} x marginal" for label in labels[3:])]
    lines = ["| scenario | " + " | ".join(heads) + " |", "|" + " --- |" * (len(heads) + 1)]
    for scenario in scenarios:
        cells = [_rate(against(found, scenario.name, label, label, 0.9)[0]) for label in labels[:3]]
        for label, base, target in (
            ("learned", "marginal", 0.9),
            ("learned", "best_fit_50", 0.9),
            ("learned", "marginal", 0.99),
            *((label, "marginal", 0.9) for label in labels[3:]),
        ):
            cells.append(_ratio(against(found, scenario.name, label, base, target)[1]))
        lines.append(f"| {scenario.name} | " + " | ".join(cells) + " |")
    return lines


def attained(found: Outcome) -> list[str]:
    """Size-fair attainment by load, mean over seeds."""
    loads = sorted({c.load for c in found.cells})
    lines = [
        "Share of the work in time, %, by multiples of the best heuristic's knee:",
        "",
        "| policy | " + " | ".join(f"{x:g} x" for x in loads) + " |",
        "|" + " --- |" * (len(loads) + 1),
    ]
    for label in dict.fromkeys(c.policy for c in found.cells):
        means = []
        for load in loads:
            mine = [c.report for c in found.cells if (c.policy, c.load) == (label, load)]
            means.append(100 * sum(r.by_work["5"] for r in mine) / len(mine))
        lines.append(f"| {label} | " + " | ".join(f"{m:.1f}" for m in means) + " |")
    return lines


def _rate(rate: Interval) -> str:
    return f"{rate.value:.1f}" if rate.value > 0 else "–"


def _ratio(ratio: Interval) -> str:
    if isnan(ratio.value):
        return "–"
    if isnan(ratio.low):
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


if __name__ == "__main__":
    raise SystemExit(main())
