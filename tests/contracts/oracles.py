"""What each scorer should say, once more and independently: whole-array numpy, no kernels.

Every function maps (state, params) to scores (n, c) before masking.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from policies.scorers.drift_plus_penalty import BASES


def _batch(s):
    return (s.fleet.running + s.fleet.foreign_running)[s.routes.decode]


def _backlog(s):
    return (s.fleet.backlog_tokens + s.fleet.foreign_backlog)[s.routes.prefill]


def _wide(s, row):
    return np.broadcast_to(row, s.mask.shape)


def _median(s):
    ttft, tpot = np.median(s.estimates.ttft, axis=2), np.median(s.estimates.tpot, axis=2)
    decode = np.maximum(s.requests.expected - 1, 0)[:, None] * tpot
    return ttft, tpot, decode


def _since_arrival(s):
    ttft, tpot, decode = _median(s)
    ttft = ttft + (s.now - s.requests.arrived)[:, None]
    return ttft, tpot, ttft + decode


def random(s, p):
    return s.draws


def round_robin(s, p):
    return _wide(s, -(1 + s.fleet.dispatched)[s.routes.decode])


def weighted_round_robin(s, p):
    return _wide(s, (-(1 + s.fleet.dispatched) / s.fleet.speed)[s.routes.decode])


def least_requests(s, p):
    return _wide(s, -_batch(s))


def least_tokens(s, p):
    return _wide(s, -(s.fleet.context + s.fleet.foreign_context)[s.routes.decode])


def power_of_two(s, p):
    order = np.argsort(-np.where(s.mask, s.draws, -1.0), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    return np.where(rank < 2, -_batch(s), -np.inf)


def lmetric(s, p):
    return -(_backlog(s) + s.requests.prompt[:, None] - s.estimates.cached) * (_batch(s) + 1)


def best_fit(s, p):
    ttft, tpot, e2e = _since_arrival(s)
    limits = np.stack([s.requests.ttft, s.requests.tpot, s.requests.e2e])
    used = np.stack([ttft, tpot, e2e]) / limits[:, :, None]
    headroom = (np.asarray(p)[:, None, None] - used).min(axis=0)
    free = np.isinf(limits).all(axis=0)[:, None]
    return np.where(free, 1 / (1 + e2e), np.where(headroom >= 0, 2 - headroom, headroom))


def prefix_affinity(s, p):
    load = np.where(s.mask, _batch(s), np.nan)
    least, most = (f.reduce(load, axis=1, keepdims=True) for f in (np.fmin, np.fmax))
    spare = np.where(most > least, (most - load) / np.where(most > least, most - least, 1), 1)
    used = (s.fleet.kv_used + s.fleet.foreign_context) / s.fleet.kv_capacity
    free = np.clip(1 - used, 0, None)[s.routes.decode]
    return p[0] * s.estimates.cached / s.requests.prompt[:, None] + p[1] * spare + p[2] * free


def sticky(s, p):
    pending = _backlog(s) * s.fleet.per_token[s.routes.prefill]
    warm = s.estimates.cached / s.requests.prompt[:, None]
    warm = np.where(s.estimates.sticky > 0, np.maximum(warm, p[1]), warm)
    load = pending if p[2] > 0 else _batch(s)
    return np.where((warm > 0) & (pending <= p[0]), 1 + warm, -load / (1 + load))


def predicted(s, p):
    ttft, _, decode = _median(s)
    return -p[0] * ttft - p[1] * decode


def just_enough(s, p):
    ttft, tpot, e2e = _since_arrival(s)
    limits = [limit[:, None] for limit in (s.requests.ttft, s.requests.tpot, s.requests.e2e)]
    meets = np.all([x <= p[0] * y for x, y in zip((ttft, tpot, e2e), limits, strict=True)], axis=0)
    meets &= np.any(np.isfinite(limits), axis=0)
    return np.where(meets, 2 - 1 / (1 + e2e), 1 / (1 + e2e))


def pools(s, p):
    length = (s.requests.prompt + s.requests.expected)[:, None]
    low, high = s.fleet.pool_low[s.routes.decode], s.fleet.pool_high[s.routes.decode]
    load = _batch(s)
    away = np.where(length < low, low - length, length - high + 1)
    return np.where((low <= length) & (length < high), 1 / (1 + load), -away - load / (1 + load))


def _step(fleet, d, batch, context, prefill=0.0, cached=0.0):
    """The step time as `domain.fleet.Profile` words it."""
    memory = fleet.weights[d] + fleet.per_context[d] * context
    compute = fleet.per_token[d] * (batch + prefill)
    compute = compute + fleet.per_attention[d] * prefill * (cached + prefill / 2)
    tokens = batch + prefill
    touched = fleet.experts[d] * tokens / (tokens + fleet.expert_tokens[d])
    fixed = fleet.overhead[d] + fleet.per_sequence[d] * batch + touched
    return fixed + np.maximum(memory, compute)


def _stream_losses(s, p, d, expected, before, after, pause):
    """Sum over the streams of replica d of worth x (chance alone - chance joined)."""
    f, k = s.fleet, slice(0, s.fleet.n_streams[d])
    tokens, decoding = f.tokens[d, k], f.tokens[d, k] > 0
    began = np.where(decoding, f.first_at[d, k], s.now)
    left = np.maximum(f.expected[d, k] - tokens, p[3])
    worth = ((f.prompt[d, k] + 5 * (tokens + left)) / 1000) ** p[5]

    def chance(extra):
        rest = left * before + extra
        pace = (s.now - began + rest) / np.maximum(tokens + left - 1, 1)
        late = rest / np.maximum(f.e2e_deadline[d, k] - s.now, 1e-9)
        both = [-p[2] * (x - 1) for x in (pace / f.tpot_limit[d, k], late)]
        gates = np.isinf(f.tpot_limit[d, k]), np.isinf(f.e2e_deadline[d, k])
        return np.prod([np.where(g, 1, expit(x)) for g, x in zip(gates, both, strict=True)], axis=0)

    extra = np.minimum(left, expected) * (after - before) + pause
    alive = began <= f.ttft_deadline[d, k]
    return float((worth * alive * (chance(0.0) - chance(extra))).sum())


def marginal(s, p):
    out, harm, worth = _marginal(s, p)
    return np.where(_held(s, p, out, harm, p[6] * worth)[:, None], -np.inf, out)


def _held(s, p, out, harm, most):
    """Whom joining his best route makes cost others more than `most` (n,), if he has time."""
    best = np.where(s.mask, out, -np.inf).argmax(axis=1)
    held = harm[np.arange(len(best)), best] > most
    held &= ((_batch(s) > 0) | ~s.mask).all(axis=1)
    return held & (s.now < s.requests.arrived + p[7] * np.where(
        np.isfinite(s.requests.ttft), s.requests.ttft, 0
    ))  # fmt: skip


def _marginal(s, p):
    """Values and harm (n, c), worth (n,)."""
    out, cost = np.zeros((2, *s.mask.shape))
    q, f, e = s.requests, s.fleet, s.estimates
    for i, c in np.ndindex(out.shape):
        d, r = s.routes.decode[c], s.routes.prefill[c]
        batch = f.running[d] + f.foreign_running[d]
        context = f.context[d] + f.foreign_context[d]
        new = max(q.prompt[i] - e.cached[i, c], 1)
        half = context + q.prompt[i] + q.expected[i] / 2
        after = np.median(e.tpot[i, c])
        scale = after / _step(f, d, batch + 1, half)
        before = scale * _step(f, d, batch, context)
        steps = np.ceil(new / f.chunk[d])
        beside = _step(f, d, batch, context, new / steps, e.cached[i, c])
        pause = (steps * (scale * beside - before)) * (r == d)
        lost = _stream_losses(s, p, d, q.expected[i], before, after, pause)
        limit = p[4] or q.tpot[i]
        run = max(q.expected[i] / 2, p[3])
        worth = ((q.prompt[i] + 5 * q.expected[i]) / 1000) ** p[5]
        slower = before + (run * (after - before) + pause) / (2 * run)
        if np.isfinite(limit):
            gates = [expit(-p[2] * (x / limit - 1)) for x in (before, slower)]
            lost += f.foreign_running[d] * worth * (gates[0] - gates[1])
        work = new * f.per_token[r] + q.expected[i] * (
            f.per_sequence[d]
            + f.per_token[d]
            + f.per_context[d] * (q.prompt[i] + q.expected[i] / 2)
        )
        cost[i, c] = p[0] * lost
        out[i, c] = q.weight[i] * worth * e.p_slo[i, c] - cost[i, c]
        out[i, c] -= p[1] * s.routes.price[c] * work
    return out, cost, q.weight * ((q.prompt + 5 * q.expected) / 1000) ** p[5]


def _soft(x, unit):
    return np.where(np.isinf(x), 1, x / (x + unit))


def _used(predicted, limit):
    share = predicted / np.where(limit > 0, limit, 1)
    return np.where(np.isinf(limit), 0, np.where(limit <= 0, 1, share / (share + 1)))


def actor(s, p):
    rule, reach, hold, weights = p[:8], p[8], p[9:14], p[14:].reshape(12, 4)
    q, f, e, d, r = s.requests, s.fleet, s.estimates, s.routes.decode, s.routes.prefill
    base, harm, worth = _marginal(s, rule)
    waited = (s.now - q.arrived)[:, None]
    ttft, tpot, decode = _median(s)
    cost = -cheapest(s, None)
    lost = _marginal(s, [1.0, *rule[1:]])[1]
    with np.errstate(invalid="ignore"):
        late = [
            _used(x, (y[:, None] - waited)) for x, y in ((ttft, q.ttft), (ttft + decode, q.e2e))
        ]
        traits = [
            np.ones_like(base), e.p_slo, _soft(lost, 1), _soft(cost, 1), late[0],
            _used(tpot, q.tpot[:, None]), late[1], _wide(s, _soft(_batch(s), 16)),
            _wide(s, _soft(_backlog(s) * f.per_token[r], 0.05)),
            _wide(s, _soft((f.overhead + f.weights)[d], 0.02)), _tighter(s),
            _wide(s, _soft(f.foreign_running[d], 16)),
        ]  # fmt: skip
        context = np.stack([
            np.ones_like(q.tpot), 1 - _soft(q.tpot, 0.05), _soft(q.expected, 200),
            np.full_like(q.tpot, _soft(_batch(s), 16).mean()),
        ])  # fmt: skip
    residual = np.einsum("kj,kic,ji->ic", weights, np.stack(traits), context)
    out = base + worth[:, None] * residual / (1 + np.abs(residual) / reach)
    best = np.where(s.mask, out, -np.inf).argmax(axis=1)
    with np.errstate(invalid="ignore"):
        used = np.maximum(waited[:, 0], 0) / q.ttft
    chance = e.p_slo[np.arange(len(best)), best]
    above = rule[6] + hold @ np.stack([*context[1:], used, chance])
    held = _held(s, rule, out, harm, np.maximum(above, 0) * worth)
    return np.where(held[:, None], -np.inf, out)


def network(s, p):
    rule, until, reach, h, rest = p[:8], p[8], p[9], int(p[10]), p[11:]
    q, f, d, k = s.requests, s.fleet, s.routes.decode, 21
    base, worth = marginal(s, rule), q.weight * ((q.prompt + 5 * q.expected) / 1000) ** rule[5]
    harm = worth[:, None] * s.estimates.p_slo + rule[1] * cheapest(s, None) - base
    best = np.where(s.mask, base, -np.inf).max(axis=1)
    waited = np.minimum(np.maximum(s.now - q.arrived, 0) / q.ttft, 1)
    units = np.array([1, 1, 1, 0.5, 0.5, 0.5, 1, 0.3, 0.25, 0.125, 1, 1])
    with np.errstate(invalid="ignore"):
        tight, more = 1 - _soft(q.tpot, 0.05), [_soft((best[:, None] - base) / worth[:, None], 0.2)]
    per = [tight, _soft(q.expected, 200), _soft(q.prompt, 1000), waited, 1.0 * (q.class_id == 0)]
    more += [_soft(np.maximum(harm, 0) / worth[:, None], 0.5)]
    more += [np.repeat(row[:, None], len(d), axis=1) for row in per]
    more += [_wide(s, _soft((f.overhead + f.weights)[d], 0.02))]
    more += [_wide(s, _soft(f.foreign_running[d], 16))]
    x = np.concatenate([_traits(s) * units, np.stack(more, axis=2)], axis=2)
    cuts = np.cumsum([h * k, h, 2 * h * h, h, h, h, h])
    w1, b1, w2, b2, route, hold, shed, bias = np.split(rest, cuts)
    there = s.mask[:, :, None]

    def mean(a):
        return np.where(there, a, 0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)

    def squash(a):
        return a / (1 + np.abs(a))

    def bounded(r):
        return r / (1 + np.abs(r) / reach)

    one = squash(x @ w1.reshape(h, k).T + b1)
    both = np.concatenate([one, np.repeat(mean(one)[:, None], len(d), axis=1)], axis=2)
    two = squash(both @ w2.reshape(h, 2 * h).T + b2)
    out = base + worth[:, None] * bounded(two @ route)
    above = np.maximum(rule[6] - bounded(mean(two) @ hold + bias[0]), 0) * worth
    chance = np.where(s.mask, s.estimates.p_slo, 0).max(axis=1)
    refuse = worth * (bounded(mean(two) @ shed + bias[1]) - chance)
    first = np.where(s.mask, out, -np.inf).argmax(axis=1)
    harm = harm[np.arange(len(first)), first]
    held = (harm > above) & (harm - above >= refuse) & ((_batch(s) > 0) | ~s.mask).all(axis=1)
    held &= s.now < q.arrived + until * np.where(np.isfinite(q.ttft), q.ttft, 0)
    return np.where(held[:, None], -np.inf, out)


def _tighter(s):
    """Share of a route's own streams with a tighter pace than each request's."""
    out = np.zeros(s.mask.shape)
    for i, c in np.ndindex(out.shape):
        d = s.routes.decode[c]
        limits = s.fleet.tpot_limit[d, : s.fleet.n_streams[d]]
        out[i, c] = (limits < s.requests.tpot[i]).mean() if len(limits) else 0.0
    return out


def cheapest(s, p):
    d, r = s.routes.decode, s.routes.prefill
    prompt, expected = s.requests.prompt[:, None], s.requests.expected[:, None]
    new = np.maximum(prompt - s.estimates.cached, 1)
    each = s.fleet.per_sequence + s.fleet.per_token
    mean = prompt + expected / 2
    decode = expected * (each[d] + s.fleet.per_context[d] * mean)
    return -s.routes.price * (new * s.fleet.per_token[r] + decode)


def _traits(s):
    """(n, c, D) in the order of `policies.names.TRAITS`."""
    ttft, tpot, e2e = _since_arrival(s)
    q, wide = s.requests, np.ones(s.mask.shape)
    shares = [
        np.minimum(x / limit[:, None], 4)
        for x, limit in ((ttft, q.ttft), (tpot, q.tpot), (e2e, q.e2e))
    ]
    rows = [wide, s.estimates.p_slo, s.estimates.quality, *shares, np.log1p(ttft), np.log1p(e2e)]
    rows += [np.log1p(_batch(s)) * wide, np.log1p(_backlog(s)) * wide]
    rows += [s.estimates.cached / q.prompt[:, None], np.log1p(-cheapest(s, None))]
    return np.stack(rows, axis=2)


def linear(s, p):
    best = np.where(s.mask, s.estimates.p_slo, -np.inf).max(axis=1, keepdims=True)
    return _traits(s) @ p[:-1] - 1e3 * (s.estimates.p_slo < best - p[-1])


def bandit(s, p):
    x = _traits(s)
    d = x.shape[2]
    theta, cov = p[4 : 4 + d], p[4 + d :].reshape(d, d)
    bonus = p[0] * np.sqrt(np.einsum("ncj,jk,nck->nc", x, cov, x))
    if p[2]:
        bonus = bonus * np.log(s.draws / (1 - s.draws)) * np.sqrt(3) / np.pi
    value = x @ theta + np.clip(bonus, -p[1], p[1])
    return s.requests.weight[:, None] * value - p[3] * x[:, :, -1]


def drift_plus_penalty(s, p):
    base = globals()[BASES[int(p[0])]]
    score = np.where(s.mask, base(s, p[18:]), -np.inf)
    if p[1]:
        finite = np.where(np.isneginf(score), np.nan, score)
        low, high = (f.reduce(finite, axis=1, keepdims=True) for f in (np.fmin, np.fmax))
        with np.errstate(invalid="ignore", divide="ignore"):
            score = np.where(high > low, (score - low) / (high - low), score * 0 + 1)
        score = np.where(np.isnan(finite), -np.inf, score)
    rank = np.minimum(s.requests.class_id, 7)
    met, good = p[2 + rank][:, None], p[10 + rank][:, None]
    return score + met * s.estimates.p_slo + good * s.estimates.quality
