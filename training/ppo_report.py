"""What `sluice train policy --algo ppo` leaves for people: report.md and report.html."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.registry import Entry
from training.policy_report import Rows, differences, html, table, worlds
from training.report import STYLE

if TYPE_CHECKING:
    from training.train_es import Arena
    from training.train_ppo import Found, Row

TENTHS = 10


def write(folder: Path, arena: Arena, found: Found, entry: Entry) -> None:
    """Both reports into a folder."""
    parts = [("Training, in tenths", _tenths(found.rows))]
    if found.best.generation:
        parts += [
            ("Gains by world, which training never met", worlds(arena, found.best)),
            ("Where it differs from the rule", differences(arena, found.policy)),
        ]
    parts.append(("Judged without its chance", _judged(found)))
    head = _headline(found)
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


def _headline(found: Found) -> str:
    best, spent = found.best, f"{found.seconds / 60.0:.1f} CPU-minutes"
    if not best.generation:
        return f"No better than the marginal rule after {len(found.rows)} updates and {spent}."
    return (
        f"Size-fair goodput@90 {best.ratio['0.9']:.3f} x that of the marginal rule, @99 "
        f"{best.ratio['0.99']:.3f} x (geometric mean over worlds; the least at 90: "
        f"{best.least:.3f}), after {best.generation} of {len(found.rows)} updates and {spent}. The "
        "update was chosen on these worlds: a fresh comparison says a little less."
    )


def _tenths(updates: Sequence[Row]) -> Rows:
    """Means over tenths of the training."""
    rows: Rows = [
        (
            "updates", "in time", "rule", "first class late", "rule", "mu", "waited", "refused",
            "as the rule", "KL", "clipped", "entropy", "explained", "of the cost",
        )
    ]  # fmt: skip
    begun = 1
    for part in np.array_split(np.array(updates, float), min(TENTHS, len(updates))):
        mean = dict(zip(updates[0]._fields, part.mean(axis=0), strict=True))
        rows.append(
            (
                f"{begun} to {begun + len(part) - 1}",
                *(f"{100 * mean[n]:.1f} %" for n in ("goodput", "rule", "late", "rule_late")),
                f"{mean['mu']:.2f}",
                *(f"{100 * mean[n]:.1f} %" for n in ("waited", "refused", "as_rule")),
                f"{mean['kl']:.4f}",
                f"{100 * mean['clipped']:.1f} %",
                f"{mean['entropy']:.2f}",
                f"{mean['explained']:.2f}",
                f"{mean['explained_cost']:.2f}",
            )
        )
        begun += len(part)
    return rows


def _judged(found: Found) -> Rows:
    rows: Rows = [("update", "gain", "@90 x rule", "@99 x rule", "least @90")]
    for j in found.curve:
        ratios = (f"{j.ratio[target]:.3f}" for target in ("0.9", "0.99"))
        rows.append((str(j.generation), f"{j.gain:+.4f}", *ratios, f"{j.least:.3f}"))
    return rows


def _curves(found: Found) -> str:
    """Goodput against the rule, multiplier and late share, shares of the actions, judgements."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    (a, b), (c, d) = figure.subplots(2, 2)
    when = range(1, len(found.rows) + 1)

    def of(name: str) -> list[float]:
        return [getattr(row, name) for row in found.rows]

    a.plot(when, np.array(of("goodput")) - np.array(of("rule")), lw=0.8)
    a.axhline(0.0, color="#999", lw=0.8)
    a.set(xlabel="update", ylabel="share in time, less the rule's")
    b.plot(when, np.array(of("late")) - np.array(of("rule_late")), lw=0.8, label="first class late")
    b.axhline(0.0, color="#999", lw=0.8)
    right = b.twinx()
    right.plot(when, of("mu"), color="#c63", lw=0.8, label="multiplier")
    right.set(ylabel="multiplier")
    b.set(xlabel="update", ylabel="first class late, less the rule's")
    for name in ("waited", "refused", "as_rule"):
        c.plot(when, of(name), lw=0.8, label=name.replace("_", " "))
    c.set(xlabel="update", ylabel="share of decisions")
    c.legend(fontsize=7)
    judged = [j.generation for j in found.curve]
    for target in ("0.9", "0.99"):
        d.plot(judged, [j.ratio[target] for j in found.curve], marker="o", ms=3, label=f"@{target}")
    d.axhline(1.0, color="#999", lw=0.8)
    d.set(xlabel="update", ylabel="goodput, x the rule")
    d.legend(fontsize=7)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
