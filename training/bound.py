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


def ceiling(case: Case, worth: Floats, counted: Floats) -> float | None:
    """Largest share of `worth` (n,) that could meet its limits; None where the relaxation does not
    apply (split fleets, causal sessions, requests without any limit).

    `counted` (n,) is 1 for requests in the denominator; others cost nothing here. Per group of
    equal replicas with x_i the share of request i, S steps and horizon H:

        (overhead + weights) S + per_sequence sum x d + per_context sum x c <= replicas x H
        overhead S + per_sequence sum x d + per_token sum x (d + u) + attention <= replicas x H
        S >= sum x d / max_seqs,  S >= sum x u / chunk

    d decode tokens, u prompt tokens that no earlier prompt shares, c tokens read in decoding: the
    step time of `domain.fleet.Profile` summed over steps, with max(a, b) >= a and >= b.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, hstack, vstack

    trace = case.trace
    chosen = np.flatnonzero(counted > 0)
    d = (trace.output - 1).astype(np.float64)
    last = np.minimum(case.e2e, case.ttft + np.where(d > 0, case.tpot * d, 0.0))
    if (
        not trace.roots.all()
        or any(spec.phase != "both" for spec in case.fleet.replicas)
        or not np.isfinite(last[chosen]).all()
    ):
        return None
    if len(chosen) == 0:
        return 1.0
    horizon = float((trace.arrival + last)[chosen].max() - trace.arrival[chosen].min())
    u = _uncached(trace)
    groups: dict[tuple[Profile, str], int] = {}
    for spec in case.fleet.replicas:
        key = (spec.profile, spec.variant)
        groups[key] = groups.get(key, 0) + 1
    n, blocks, rhs, gains, upper = len(chosen), [], [], [], []
    shares, steps = [], []
    prompt = trace.prompt.astype(np.float64)
    for (p, variant), count in groups.items():
        able = _able(case, p, variant, u, d)[chosen]
        x = np.where(able)[0]
        who = chosen[x]
        read = d[who] * prompt[who] + d[who] * (d[who] - 1.0) / 2.0
        pairs = u[who] * (prompt[who] - u[who]) + u[who] ** 2 / 2.0
        per_seq = p.per_sequence * d[who]
        rows: list[list[Any]] = [
            [per_seq + p.per_context * read, p.overhead + p.weights, count * horizon],
            [
                per_seq + p.per_token * (d[who] + u[who]) + p.per_attention * pairs,
                p.overhead,
                count * horizon,
            ],
            [d[who] / p.max_seqs, -1.0, 0.0],
            [u[who] / p.chunk, -1.0, 0.0],
        ]
        blocks.append(csr_matrix(np.array([row[0] for row in rows])))
        steps.append([row[1] for row in rows])
        rhs += [row[2] for row in rows]
        gains.append(worth[who])
        shares.append(csr_matrix((np.ones(len(x)), (x, np.arange(len(x)))), shape=(n, len(x))))
        upper += [(0.0, 1.0)] * len(x)
    size = len(groups)
    top = [
        hstack(
            [
                *(block if j == g else csr_matrix((4, blocks[j].shape[1])) for j in range(size)),
                csr_matrix(
                    np.array([[c if j == g else 0.0 for j in range(size)] for c in steps[g]])
                ),
            ]
        )
        for g, block in enumerate(blocks)
    ]
    once = hstack([*shares, csr_matrix((n, size))])
    found = linprog(
        -np.concatenate([*gains, np.zeros(size)]),
        A_ub=vstack([*top, once]).tocsr(),
        b_ub=np.concatenate([rhs, np.ones(n)]),
        bounds=[*upper, *([(0.0, None)] * size)],
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the relaxation was not solved: {found.message}")
    return min(float(-found.fun) / float(worth[chosen].sum()), 1.0)


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
