"""What a replay came to: goodput, attainment, latencies, shares (DESIGN section 11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from training.replay import ClassPlan, Result, lateness

OUTPUT_WEIGHT = 5.0
"""Work of an output token in prompt tokens."""
QUARTILE_MIN = 300
"""Arrivals from which a group's attainment is judged on its own."""


def summary(
    results: Sequence[Result], classes: Mapping[str, ClassPlan], *, stream: bool = True
) -> dict[str, Any]:
    """Every figure of a run, JSON-ready. Quota refusals are shown apart; every other arrival is in
    the denominator. Raises: ValueError without results.
    """
    if not results:
        raise ValueError("no requests were sent")
    counted = [r for r in results if not r.quota]
    met = np.array(
        [r.met(classes.get(r.class_name, ClassPlan()).slo, stream=stream) for r in counted], bool
    )
    work = np.array([r.prompt + OUTPUT_WEIGHT * r.wanted for r in counted], float)
    span = max(r.due for r in results) - min(r.due for r in results)
    arrivals = (len(results) - 1) / span if span > 0 else 0.0
    share = float(met.mean()) if len(met) else 0.0
    late = lateness(results)
    tokens = sum(r.tokens for r in counted)
    ended = max((r.ended for r in counted if r.ended is not None), default=0.0)
    return {
        "requests": len(results),
        "quota_refused": len(results) - len(counted),
        "rate": arrivals,
        "attainment": share,
        "attainment_by_work": float((met * work).sum() / work.sum()) if len(met) else 0.0,
        "goodput": arrivals * float(met.sum()) / len(results),
        "met": int(met.sum()),
        "by_class": _groups(counted, met, (r.class_name for r in counted)),
        "by_tenant": _groups(counted, met, (r.tenant for r in counted)),
        "by_prompt_quartile": _quartiles(counted, met),
        "errors": dict(Counter(r.error for r in counted if r.error)),
        "ttft": _spread(r.ttft for r in counted),
        "tpot": _spread(r.tpot for r in counted),
        "tbt": _spread(gap for r in counted for gap in r.gaps),
        "e2e": _spread(r.e2e for r in counted if r.finished),
        "normalised": _spread(
            r.e2e / r.tokens for r in counted if r.finished and r.e2e is not None and r.tokens > 0
        ),
        "tokens_per_second": tokens / ended if ended > 0 else 0.0,
        "shares": _shares(counted),
        "predictions": predictions(counted, met),
        "client_late": _spread(late.tolist()),
    }


def predictions(counted: Sequence[Result], met: np.ndarray) -> dict[str, Any] | None:
    """How good the gateway's own forecasts were, over answers that carried them.

    Brier score of P(SLO) beside that of the base rate (lower is better), and the median of actual
    over predicted. TTFT is judged from the send.
    """
    seen = [(r, bool(m)) for r, m in zip(counted, met, strict=True) if r.p_slo is not None]
    if not seen:
        return None
    p = np.array([r.p_slo for r, _ in seen], float)
    y = np.array([m for _, m in seen], float)
    ttft = [
        (r.first - r.sent) / r.predicted_ttft
        for r, _ in seen
        if r.first is not None and r.sent is not None and r.predicted_ttft
    ]
    tpot = [r.tpot / r.predicted_tpot for r, _ in seen if r.tpot is not None and r.predicted_tpot]
    return {
        "n": len(seen),
        "brier": float(((p - y) ** 2).mean()),
        "brier_base_rate": float(y.mean() * (1 - y.mean())),
        "mean_p": float(p.mean()),
        "mean_met": float(y.mean()),
        "ttft_actual_over_predicted": float(np.median(ttft)) if ttft else None,
        "tpot_actual_over_predicted": float(np.median(tpot)) if tpot else None,
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    found = np.array([v for v in values if v is not None], float)
    if not len(found):
        return None
    p50, p90, p99 = np.percentile(found, [50, 90, 99])
    return {
        "n": len(found),
        "mean": float(found.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
    }


def _groups(
    counted: Sequence[Result], met: np.ndarray, names: Iterable[str]
) -> dict[str, dict[str, float]]:
    groups: dict[str, list[bool]] = {}
    for name, _, m in zip(names, counted, met, strict=True):
        groups.setdefault(name, []).append(bool(m))
    return {
        name: {"n": len(found), "attainment": sum(found) / len(found)}
        for name, found in sorted(groups.items())
    }


def _quartiles(counted: Sequence[Result], met: np.ndarray) -> dict[str, dict[str, float]]:
    prompts = np.array([r.prompt for r in counted])
    if len(prompts) < 4:
        return {}
    edges = np.quantile(prompts, [0.25, 0.5, 0.75])
    names = [f"q{1 + int(np.searchsorted(edges, p, side='left'))}" for p in prompts]
    return _groups(counted, met, names)


def _shares(counted: Sequence[Result]) -> dict[str, float]:
    served = Counter(r.replica for r in counted if r.replica)
    total = sum(served.values())
    return {name: count / total for name, count in sorted(served.items())}
