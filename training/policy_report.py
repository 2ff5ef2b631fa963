"""What `sluice train policy` leaves for people: report.md and report.html."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.config import ActorPolicy, PolicyConfig
from policies.names import ACTOR_CONTEXTS, HOLD_CONTEXTS
from policies.registry import Entry
from training.measures import MET
from training.report import STYLE

if TYPE_CHECKING:
    from training.train_es import Arena, Judged, Trained
    from training.worlds import World

Rows = list[tuple[str, ...]]

LOOKED_AT = 4
"""Validation worlds in which decisions are compared."""
LOAD = 2
"""Place in `training.train_es.LOADS` of the load at which they are."""


def write(folder: Path, arena: Arena, found: Trained, entry: Entry) -> None:
    """Both reports into a folder."""
    parts = [
        ("Gains by world, which training never met", worlds(arena, found.best)),
        ("Where it differs from where it started", differences(arena, found.policy)),
        ("Constants", _constants(arena, found)),
    ]
    if isinstance(found.policy, ActorPolicy):
        parts.append(("Weights of the residual", _weights(found.policy)))
        parts.append(("What is added to `hold_above`", _holding(found.policy)))
    head = _headline(arena, found)
    lines = [f"# {entry.name}", "", head, "", f"`{entry.card['command']}`", ""]
    for title, rows in parts:
        lines += [f"## {title}", "", *table(rows), ""]
    (folder / "report.md").write_text("\n".join(lines))
    page = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(entry.name)}</title>",
        f"<style>{STYLE}</style><h1>{escape(entry.name)}</h1><p>{escape(head)}</p>",
        f"<p class=note><code>{escape(entry.card['command'])}</code></p>{_curves(found)}",
    ]
    for title, rows in parts:
        page.append(f"<h2>{escape(title)}</h2>{html(rows)}")
    (folder / "report.html").write_text("\n".join(page))


def _headline(arena: Arena, found: Trained) -> str:
    best = found.best
    return (
        f"Size-fair goodput@90 {best.ratio['0.9']:.3f} x that of "
        f"{arena.job.start.kind}, @99 "
        f"{best.ratio['0.99']:.3f} x (geometric mean over worlds; the least at 90: "
        f"{best.least:.3f}), after {best.generation} of {len(found.fitness)} generations and "
        f"{found.seconds / 60.0:.0f} CPU-minutes. The mean was chosen on these worlds: a fresh "
        "comparison says a little less."
    )


def _name(world: World) -> tuple[str, str, str]:
    """Scenario, fleet, and what else was drawn."""
    scenario = world.scenario
    fleet = ", ".join(f"{g.count} {g.profile}" for g in scenario.fleet)
    source = scenario.workload[0]
    lengths = [
        f"{source.options[name]:.0f} {name.removesuffix('_median')} tokens"
        for name in ("prompt_median", "output_median")
        if name in source.options
    ]
    drawn = [
        *lengths,
        f"delay {scenario.metrics.delay:.2g} s",
        f"sigma {scenario.length_sigma:.2g}",
    ]
    if world.skew is not None:
        drawn.append("wrong constants")
    return scenario.name, fleet, ", ".join(drawn)


def worlds(arena: Arena, best: Judged) -> Rows:
    """What each validation world is, and the ratio that the policy reaches there."""
    rows: Rows = [("scenario", "fleet", "drawn", "goodput@90 x start")]
    for k, ratio in enumerate(best.by_world):
        rows.append((*_name(arena.world("validate", k)), f"{ratio:.3f}"))
    return rows


def differences(arena: Arena, learned: PolicyConfig) -> Rows:
    """Start and policy beside each other at one load: who is met, who waits, and where they go."""
    rows: Rows = [
        ("scenario", "policy", "met by class", "refused", "held > 0.1 s", "share by kind")
    ]
    for k in range(min(LOOKED_AT, arena.job.validate)):
        world = arena.world("validate", k)
        for name, policy in (("start", arena.job.start), ("learned", learned)):
            rows.append((world.scenario.name, name, *_looked_at(arena, world, policy)))
    return rows


def _looked_at(arena: Arena, world: World, policy: PolicyConfig) -> tuple[str, ...]:
    case = arena.cases(world, 50_000)[-1 if world.scenario.gateways > 1 else LOAD]
    run = arena.run(case, policy)
    trace, sent = case.trace, np.isfinite(run.sent)
    met = [
        f"{name} {100 * float((run.verdict[trace.class_id == k] == MET).mean()):.0f} %"
        for k, name in enumerate(trace.classes)
    ]
    kinds = np.array([spec.name.rsplit("-", 1)[0] for spec in case.fleet.replicas])
    where = kinds[run.replica[sent]]
    shares = [f"{100 * float((where == kind).mean()):.0f} % {kind}" for kind in np.unique(kinds)]
    held = (run.sent - run.arrival)[sent] > 0.1
    return (
        ", ".join(met),
        f"{100 * float((~sent).mean()):.1f} %",
        f"{100 * float(held.mean()):.0f} %",
        ", ".join(shares),
    )


def _weights(policy: ActorPolicy) -> Rows:
    rows: Rows = [("trait", *ACTOR_CONTEXTS)]
    for trait, row in (policy.weights or {}).items():
        rows.append((trait, *(f"{row.get(z, 0.0):+.3f}" for z in ACTOR_CONTEXTS)))
    return rows


def _holding(policy: ActorPolicy) -> Rows:
    rows: Rows = [("context", "share of its worth")]
    return rows + [(z, f"{policy.hold_more.get(z, 0.0):+.3f}") for z in HOLD_CONTEXTS]


def _constants(arena: Arena, found: Trained) -> Rows:
    """The numbers that start and policy both have, where they differ."""
    before, after = arena.job.start.model_dump(), found.policy.model_dump()
    rows: Rows = [("constant", "start", "learned")]
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, float) and isinstance(known, float) and value != known:
            rows.append((name, f"{known:.4g}", f"{value:.4g}"))
    return rows


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """In Markdown."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in body]


def html(rows: Sequence[Sequence[str]]) -> str:
    """In HTML."""
    head, *body = rows
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _curves(found: Trained) -> str:
    """Gain of every generation's candidates, and the mean's goodput on the validation worlds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    mean, best = zip(*found.fitness, strict=True)
    left.plot(range(1, len(mean) + 1), mean, label="mean of the candidates")
    left.plot(range(1, len(best) + 1), best, lw=0.8, label="best")
    left.axhline(0.0, color="#999", lw=0.8)
    left.set(xlabel="generation", ylabel="gain over the start")
    left.legend(fontsize=7)
    when = [j.generation for j in found.curve]
    for target in ("0.9", "0.99"):
        right.plot(
            when, [j.ratio[target] for j in found.curve], marker="o", ms=3, label=f"@{target}"
        )
    right.plot(when, [j.least for j in found.curve], ls="--", lw=0.8, label="least @0.9")
    right.axhline(1.0, color="#999", lw=0.8)
    right.axvline(found.best.generation, color="#999", lw=0.8, ls=":")
    right.set(xlabel="generation", ylabel="goodput, x the start")
    right.legend(fontsize=7)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
