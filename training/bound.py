"""What no policy could beat: a linear relaxation of serving one case.

Requests may be split over replicas, batches are always full, the future is known, and limits only
say which replicas could serve a request alone. Loose by design (`docs/table.md` prints by how
much): queueing, bursts inside the horizon and what a batch does to its members' pace are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domain.fleet import Profile
from training.scenario import Case
from training.traces import Floats, Trace

WINDOWS = 5
"""Ends of horizons, at quantiles of the deadlines: what is due by then must be done by then."""


def ceiling(
    case: Case, worth: Floats, counted: Floats, *, stationary: bool = False
) -> float | None:
    """Largest share of `worth` (n,) that could meet its limits; None where the relaxation does not
    apply (split fleets, causal sessions, requests without any limit).

    `counted` (n,) is 1 for requests in the denominator; others cost nothing here. The ceiling holds
    for the case as it is, whose last requests may be served long after they came; `stationary`
    gives that of a load that goes on like this for ever, where work must be done at the pace at
    which it comes: tighter, but a short case may end above it. Per group of
    equal replicas and horizon, with x_i the share of request i, summed over those due inside it, S
    steps and H seconds from the first arrival of these:

        (overhead + weights) S + per_sequence sum x d + per_context sum x c <= replicas x H
        overhead S + per_sequence sum x d + per_token sum x (d + u) + attention <= replicas x H
        S >= sum x d / max_seqs,  S >= sum x u / chunk

    d decode tokens, u prompt tokens that no earlier prompt shares, c tokens read in decoding: the
    step time of `domain.fleet.Profile` summed over steps, with max(a, b) >= a and >= b; overhead
    holds the experts that one token touches.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_diag, csr_matrix, hstack, vstack

    trace = case.trace
    chosen = np.flatnonzero(counted > 0)
    d = (trace.output - 1).astype(np.float64)
    pace = np.multiply(case.tpot, d, out=np.zeros(len(d)), where=d > 0)
    due = trace.arrival + np.minimum(case.e2e, case.ttft + pace)
    if (
        not trace.roots.all()
        or any(spec.phase != "both" for spec in case.fleet.replicas)
        or not np.isfinite(due[chosen]).all()
    ):
        return None
    if len(chosen) == 0:
        return 1.0
    u = _uncached(trace)
    groups: dict[tuple[Profile, str], int] = {}
    for spec in case.fleet.replicas:
        key = (spec.profile, spec.variant)
        groups[key] = groups.get(key, 0) + 1
    ends = np.quantile(due[chosen], np.linspace(0.0, 1.0, WINDOWS + 1)[1:])
    times = [end - trace.arrival[chosen[due[chosen] <= end]].min() for end in ends.tolist()]
    if stationary:
        ends, times = ends[-1:], [float(np.ptp(trace.arrival[chosen]))]
    work, gains, once, limits = [], [], [], []
    for (p, variant), count in groups.items():
        mine = np.flatnonzero(_able(case, p, variant, u, d)[chosen])
        who = chosen[mine]
        fixed = p.overhead + p.experts / (1.0 + p.expert_tokens)  # a step has one token at least
        columns = _columns(p, trace, u[who], d[who], who)
        parts, steps = [], []
        for end, seconds in zip(ends.tolist(), times, strict=True):
            parts.append(columns * (due[who] <= end))
            steps.append(np.array([[fixed + p.weights], [fixed], [-1.0], [-1.0]]))
            limits += [count * seconds, count * seconds, 0.0, 0.0]
        work.append(hstack([csr_matrix(np.concatenate(parts)), block_diag(steps)]))
        gains.append(np.concatenate([worth[who], np.zeros(len(ends))]))
        shares = csr_matrix((np.ones(len(mine)), (mine, np.arange(len(mine)))),
                            shape=(len(chosen), len(mine)))  # fmt: skip
        once.append(hstack([shares, csr_matrix((len(chosen), len(ends)))]))
    found = linprog(
        -np.concatenate(gains),
        A_ub=vstack([block_diag(work), hstack(once)]).tocsr(),
        b_ub=np.concatenate([limits, np.ones(len(chosen))]),
        bounds=(0.0, None),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the relaxation was not solved: {found.message}")
    return min(float(-found.fun) / float(worth[chosen].sum()), 1.0)


def _columns(p: Profile, trace: Trace, u: Floats, d: Floats, who: np.ndarray[Any, Any]) -> Floats:
    """(4, n) what each request adds to the rows of `ceiling`."""
    prompt = trace.prompt[who].astype(np.float64)
    read = d * prompt + d * (d - 1.0) / 2.0
    pairs = u * (prompt - u) + u**2 / 2.0
    return np.array(
        [
            p.per_sequence * d + p.per_context * read,
            p.per_sequence * d + p.per_token * (d + u) + p.per_attention * pairs,
            d / p.max_seqs,
            u / p.chunk,
        ]
    )


def _uncached(trace: Trace) -> Floats:
    """(n,) prompt tokens that no earlier prompt's prefix holds; at least one is always computed."""
    seen: set[int] = set()
    hit = np.zeros(len(trace))
    for i in range(len(trace) if len(trace.blocks) else 0):
        blocks = trace.blocks_of(i).tolist()
        for k, block in enumerate(blocks):
            if block not in seen:
                break
            hit[i] = (k + 1) * trace.block_tokens
        seen.update(blocks)
    rest: Floats = np.maximum(trace.prompt - hit, 1.0)
    return rest


def _able(case: Case, p: Profile, variant: str, u: Floats, d: Floats) -> np.ndarray[Any, Any]:
    """(n,) requests that such a replica could serve within their limits if it were idle."""
    trace = case.trace
    prompt = trace.prompt.astype(np.float64)
    steps = np.ceil(u / p.chunk)
    pairs = u * (prompt - u) + u**2 / 2.0
    ttft = steps * p.overhead + np.maximum(
        steps * p.weights, p.per_token * u + p.per_attention * pairs
    )
    pace = p.overhead + p.per_sequence + np.maximum(p.weights + p.per_context * prompt, p.per_token)
    quality = {v.name: v.quality for v in case.fleet.variants}
    best = max(quality.values())
    floors = [c.slo.quality for c in case.classes]
    allowed = np.array([f is None or quality[variant] >= min(f, best) for f in floors])
    able: np.ndarray[Any, Any] = (
        (ttft <= case.ttft)
        & ((pace <= case.tpot) | (d == 0))
        & (ttft + d * pace <= case.e2e)
        & allowed[trace.class_id]
        & (trace.prompt + trace.output <= p.max_context)
    )
    return able
