"""The table of a comparison for people: terminal, Markdown, and one HTML file with its plots."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from math import isnan

from training.intervals import Interval
from training.table import Block, Goodput, Row, Table

HEADERS = (
    "policy", "size-fair @90 /s", "x best classic", "plain @90 /s", "size-fair @99 /s",
    "% at the knee", "worst slice", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "shed", "share",
    "Jain", "cost", "J",
)  # fmt: skip
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;
color:#1c2430;background:#fff}
h2{margin-top:2.5rem;border-bottom:1px solid #d5dbe3;padding-bottom:.3rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:.25rem .6rem;border-bottom:1px solid #e6eaf0;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
tr.base td{background:#f2f6fb} tr.above td{background:#eefaf1}
p.note{color:#556} svg{max-width:100%;height:auto}
"""
HOW = (
    "Size-fair goodput@X: the last rate of the grid (falling fit of the mean over seeds) at which "
    "X % of the work (prompt + 5 x output tokens) meets all limits, and no prompt quartile, class "
    "or tenant with 300 arrivals is over 5 points below X. Intervals: 95 %, bootstrap over paired "
    "seeds, expanded for their number. '>': the grid ended first; '!': a lower rate of the grid "
    "fails; a dash: no rate reaches it. Cost and joules: of busy time, per request that met its "
    "limits. '*': through the live core."
)


def cells(row: Row) -> list[str]:
    """A row's cells under `HEADERS`."""
    at = row.at_knee
    return [
        row.policy + ("*" if row.live else ""),
        _rate(row.fair_goodput["0.9"]),
        _ratio(row.fair_goodput["0.9"].ratio),
        _rate(row.plain_goodput["0.9"]),
        _rate(row.fair_goodput["0.99"]),
        f"{100 * at['fair']:.1f}",
        row.worst_slice,
        f"{1e3 * at['ttft_p50']:.0f}/{1e3 * at['ttft_p99']:.0f}",
        f"{1e3 * at['tpot_p50']:.1f}/{1e3 * at['tpot_p99']:.1f}",
        f"{100 * at['shed']:.1f} %",
        f"{100 * at['largest_share']:.0f} %",
        f"{at['jain']:.3f}",
        f"{at['cost_per_good']:.2f}",
        f"{at['joules_per_good']:.0f}",
    ]


def _rate(goodput: Goodput) -> str:
    rate = goodput.rate
    if rate.value == 0.0:
        return "–"
    marks = (">" if goodput.beyond else "") + f"{rate.value:.1f}" + ("!" if goodput.gap else "")
    if not isnan(rate.low):
        marks += f" [{rate.low:.1f}, {rate.high:.1f}]"
    return marks


def _ratio(ratio: Interval) -> str:
    if isnan(ratio.value):
        return "–"
    if isnan(ratio.low):
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def headline(block: Block) -> str:
    """One line: scenario, knee, size."""
    knee = block.knee
    note = "" if knee.reached else " (no heuristic meets 90 % of the work: where it lost 10 points)"
    return (
        f"{block.scenario}: knee {knee.rate:.1f}/s ({knee.policy}){note}; {block.seeds} seeds of "
        f"{block.arrivals} counted requests; ratios to {block.baseline}"
    )


def _yardstick_lines(block: Block) -> list[str]:
    best = block.rows[0].fair_goodput["0.9"].rate.value
    lines = []
    for name, rate in block.yard_goodput.items():
        over = f", {rate / best:.2f} x the best policy here" if best > 0 else ""
        grid_end = ">" if rate >= block.rates[-1] else ""
        lines.append(f"{name} @90: {grid_end}{rate:.1f}/s{over}")
    return lines


def _stability_line(block: Block) -> str:
    if not block.stability:
        return ""
    pairs = ", ".join(f"{name} {value:.2f}" for name, value in block.stability.items())
    return f"order of policies, Kendall's tau: {pairs}"


def terminal(table: Table) -> str:
    """The table as aligned text."""
    parts = []
    for block in table.blocks:
        rows = [list(HEADERS), *(cells(row) for row in block.rows)]
        widths = [max(len(r[k]) for r in rows) for k in range(len(HEADERS))]
        lines = [
            "  ".join(
                c.ljust(w) if k == 0 else c.rjust(w)
                for k, (c, w) in enumerate(zip(r, widths, strict=True))
            )
            for r in rows
        ]
        parts.append("\n".join([headline(block), *lines, *_yardstick_lines(block)]))
        if block.stability:
            parts[-1] += "\n" + _stability_line(block)
    return "\n\n".join(parts)


def markdown(table: Table) -> str:
    """The table as Markdown, without a title of its own."""
    parts = [HOW, ""]
    parts += _overview(table)
    for block in table.blocks:
        parts += [f"### {block.scenario}", "", block.about, "", headline(block) + ".", ""]
        parts += _grid(HEADERS, [cells(row) for row in block.rows])
        parts += ["", "Size-fair attainment, %, at multiples of the knee:", ""]
        heads = ("policy", *(f"{load:g} x" for load in block.loads))
        curves = [[r.policy, *(f"{100 * v:.1f}" for v in r.fair)] for r in block.rows]
        curves += [
            [f"*{name}*", *("" if isnan(v) else f"{100 * v:.1f}" for v in curve)]
            for name, curve in block.yardsticks.items()
        ]
        parts += _grid(heads, curves)
        notes = [*_yardstick_lines(block), _stability_line(block)]
        parts += ["", *(f"- {note}" for note in notes if note), ""]
    return "\n".join(parts)


def _overview(table: Table) -> list[str]:
    """Ratios of size-fair goodput@90 to each scenario's best classic heuristic."""
    if len(table.blocks) < 2:
        return []
    names = [row.policy for row in table.blocks[0].rows]
    by = [{row.policy: row for row in block.rows} for block in table.blocks]
    rows = [
        [name, *(_ratio(b[name].fair_goodput["0.9"].ratio) if name in b else "" for b in by)]
        for name in names
    ]
    heads = ("policy", *(block.scenario for block in table.blocks))
    agree = ", ".join(f"{name} {value:.2f}" for name, value in table.stability.items())
    return [
        "Size-fair goodput@90 as a ratio to the scenario's best classic heuristic:",
        "",
        *_grid(heads, rows),
        "",
        f"Order of policies against that in {table.blocks[0].scenario}, Kendall's tau: {agree}.",
        "",
    ]


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


# ---- one file with plots


def html(table: Table) -> str:
    """A page that needs nothing else: tables and inline plots. Imports matplotlib."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Policies compared</title>",
        f"<style>{STYLE}</style><h1>Policies compared</h1><p class=note>{escape(HOW)}</p>",
    ]
    for block in table.blocks:
        parts.append(f"<h2>{escape(block.scenario)}</h2><p>{escape(block.about)}</p>")
        parts.append(f"<p class=note>{escape(headline(block))}</p>")
        parts.append(_html_table(block))
        notes = [*_yardstick_lines(block), _stability_line(block)]
        parts += [f"<p class=note>{escape(note)}</p>" for note in notes if note]
        parts.append(_plot(block))
    return "\n".join(parts)


def _html_table(block: Block) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADERS)
    lines = []
    for row in block.rows:
        kind = ""
        if row.policy == block.baseline:
            kind = " class=base"
        elif row.fair_goodput["0.9"].ratio.low > 1.0:
            kind = " class=above"
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        lines.append(f"<tr{kind}>{body}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _plot(block: Block) -> str:
    """Size-fair attainment against load, the best eight policies named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for k, row in enumerate(block.rows):
        faint = k >= 8
        style = {"color": "#c3c9d2", "lw": 1} if faint else {"lw": 1.8, "marker": "o", "ms": 3}
        left.plot(block.loads, row.fair, label=None if faint else row.policy, **style)
    for name, curve in block.yardsticks.items():
        left.plot(block.loads, curve, ls="--", lw=1.2, color="#333", label=name)
    left.axhline(0.9, color="#999", lw=0.8)
    left.set(xlabel="load, x knee", ylabel="size-fair attainment", ylim=(0, 1.02))
    left.legend(fontsize=7)
    ranked = [r for r in block.rows if r.fair_goodput["0.9"].rate.value > 0][::-1]
    for k, row in enumerate(ranked):
        rate = row.fair_goodput["0.9"].rate
        known = not isnan(rate.low)
        low, high = (rate.value - rate.low, rate.high - rate.value) if known else (0.0, 0.0)
        right.errorbar(rate.value, k, xerr=[[max(low, 0.0)], [max(high, 0.0)]], fmt="o", ms=4)
    right.set_yticks(range(len(ranked)), [r.policy for r in ranked], fontsize=7)
    right.set(xlabel="size-fair goodput@90, requests/s")
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
