"""What a learned latency model sees of (request, replica), and what it learns about each replica.

A step of a replica takes what its profile says (`domain.fleet.Profile`); here that formula is
carried further than in `predictors.roofline`, with what a gateway knows and a metric does not show:

- *Phase.* A token comes when a step of its replica ends. From the last such moment and the pace the
  rest of the running step follows, which a new prompt must wait for.
- *Chunks.* A prompt is computed in whole chunks and a rest; each step takes the longer of reading
  memory and computing.
- *Interference.* Prompts of others stretch the steps of those that decode: by the share rho of time
  that prefill has taken lately, TPOT = pace / (1 - rho).

`Pace` keeps three factors a replica (on a stream alone, on what the batch adds, on computing), by
Kalman filters on log(actual / base) of finished requests, so that constants that are off are found
in tens of outcomes. What is left is structural and the same for all replicas: `row_into` describes
it by numbers without unit or identity, and trees learn the log of actual / base from them
(`predictors.latency_gbdt`). One function for training and serving: the row of the chosen route goes
into the decision log as it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from domain.columns import FleetColumns, Floats, Ints, RequestColumns, Routes
from domain.fleet import Profile

FEATURES = (
    "log_base_ttft",
    "log_base_tpot",
    "log_new",
    "log_backlog",
    "chunks",
    "last_chunk",
    "log_batch",
    "context_share",
    "reserved_share",
    "batch_share",
    "rest_of_step",
    "step_share",
    "steps_since",
    "queue_share",
    "queue_age",
    "compute_share",
    "rho_short",
    "rho_long",
    "log_expected",
    "cached_share",
    "staleness",
    "foreign_share",
    "batch_trend",
    "waited",
    "batch_left",
    "balance",
)
"""Names of a row's features, in order. Shares, logs and counts of steps; no replica's identity."""
COUNT = len(FEATURES)
BASE_TTFT, COMPUTED, EXTRA, ROOF_TTFT, ROOF_TPOT, USED = range(COUNT, COUNT + 6)
"""Behind the features: the base of TTFT (s), the share of computing in it, what the prompt costs
those who decode (s), the roofline's own medians (s; that of TPOT is the base of TPOT), and whether
the trees' word was taken."""
WIDTH = COUNT + 6
SCHEMA_HASH = hashlib.sha256(repr((1, FEATURES)).encode()).hexdigest()[:16]
"""Names this layout; artifacts fitted under another do not load."""

COMPUTE, BOUNDARY, SHORT, LONG, AT, BATCH = range(6)
"""Rows of `Pace.rows`."""
SHORT_SPAN, LONG_SPAN = 2.0, 20.0
"""Seconds over which the share of prefill is averaged."""
PRIOR_VARIANCE = 0.09
"""Of the logs of the factors: constants are known to about 30 %."""
DRIFT = 2.0e-4
"""Variance that a log factor gains from one outcome to the next."""
CLIP = 1.0
"""Largest error of one outcome in log units that a factor learns from."""


class Live(NamedTuple):
    """The columns of a fleet that a row is made of, (m,) and (m, S)."""

    overhead: Floats
    weights: Floats
    per_sequence: Floats
    per_context: Floats
    per_token: Floats
    per_attention: Floats
    experts: Floats
    expert_tokens: Floats
    chunk: Floats
    max_seqs: Floats
    kv_capacity: Floats
    running: Floats
    context: Floats
    backlog_tokens: Floats
    kv_used: Floats
    age: Floats
    foreign_running: Floats
    foreign_context: Floats
    foreign_backlog: Floats
    n_streams: Ints
    first_at: Floats
    tokens: Floats
    expected: Floats


def live_of(fleet: FleetColumns) -> Live:
    """Those columns; the same arrays."""
    return Live(*(getattr(fleet, name) for name in Live._fields))


@njit(cache=True, error_model="numpy")
def decode_step(fleet: Live, fixed: float, r: int, batch: float, context: float) -> float:
    """Seconds of one decode step of replica r without prefill; `fixed` scales the profile."""
    memory = fleet.weights[r] + fleet.per_context[r] * context
    step = fleet.overhead[r] + fleet.per_sequence[r] * batch
    step += fleet.experts[r] * batch / (batch + fleet.expert_tokens[r])
    step += max(memory, fleet.per_token[r] * batch)
    whole: float = max(fixed * step, 1e-6)
    return whole


@njit(cache=True, error_model="numpy")
def chunk_step(
    fleet: Live,
    fixed: float,
    compute_scale: float,
    r: int,
    decode: float,
    batch: float,
    new: float,
    before: float,
) -> tuple[float, float]:
    """Seconds of a step that decodes `batch` and computes `new` prompt tokens after `before`; and
    the part of it that the factor on computing scales.
    """
    compute = fleet.per_token[r] * (batch + new)
    compute += fleet.per_attention[r] * new * (before + 0.5 * new)
    compute *= compute_scale
    tokens = batch + new
    rest = fleet.overhead[r] + fleet.per_sequence[r] * batch
    rest += fleet.experts[r] * tokens / (tokens + fleet.expert_tokens[r])
    rest *= fixed
    if compute + rest > decode:
        return compute + rest, compute
    return decode, 0.0


@njit(cache=True, error_model="numpy")
def prefill(
    fleet: Live,
    fixed: float,
    compute_scale: float,
    r: int,
    decode: float,
    batch: float,
    tokens: float,
    before: float,
) -> tuple[float, float, float]:
    """Seconds until `tokens` prompt tokens are computed, the part of it that computing scales, and
    the number of steps.
    """
    chunk = fleet.chunk[r]
    whole = np.floor(tokens / chunk)
    rest = tokens - whole * chunk
    total, computed = 0.0, 0.0
    if whole > 0.0:
        step, part = chunk_step(
            fleet, fixed, compute_scale, r, decode, batch, chunk, before + 0.5 * tokens
        )
        total += whole * step
        computed += whole * part
    if rest > 0.0:
        step, part = chunk_step(
            fleet, fixed, compute_scale, r, decode, batch, rest, before + whole * chunk
        )
        total += step
        computed += part
    return total, computed, whole + (1.0 if rest > 0.0 else 0.0)


@njit(cache=True, error_model="numpy")
def row_into(
    requests: RequestColumns,
    fleet: Live,
    routes: Routes,
    rows: Floats,
    fixed_of: Floats,
    i: int,
    c: int,
    cached: float,
    roof_ttft: float,
    roof_tpot: float,
    now: float,
    out: Floats,
) -> None:
    """Features and base predictions of request i on route c, (WIDTH,) into out; all finite.

    `rows` are `Pace.rows`, `fixed_of` (m,) the roofline's factor on a step; `cached` tokens are
    thought to be in the prefix cache.
    """
    d, p = routes.decode[c], routes.prefill[c]
    tiny = 1e-6
    fixed, scale = fixed_of[p], rows[COMPUTE, p]
    new = max(requests.prompt[i] - cached, 1.0)
    queued = max(fleet.backlog_tokens[p] + fleet.foreign_backlog[p], 0.0)
    batch_p = max(fleet.running[p] + fleet.foreign_running[p], 0.0)
    context_p = max(fleet.context[p] + fleet.foreign_context[p], 0.0)
    boundary = rows[BOUNDARY, p]
    left, begun = 0.0, 0.0
    for k in range(fleet.n_streams[p]):
        first = fleet.first_at[p, k]
        if first < np.inf:
            boundary = max(boundary, first)
            begun += 1.0
            left += max(fleet.expected[p, k] - fleet.tokens[p, k], 0.0)
    since = min(max(now - boundary, 0.0), 60.0)
    decode = decode_step(fleet, fixed, p, max(begun + fleet.foreign_running[p], 1.0), context_p)
    total, computed, steps = prefill(fleet, fixed, scale, p, decode, batch_p, queued + new, cached)
    before, _, _ = prefill(fleet, fixed, scale, p, decode, batch_p, queued, 0.0)
    rest = 0.0
    if queued <= 0.0 and batch_p > 0.0:
        passed = since / decode
        rest = decode * (1.0 - (passed - np.floor(passed))) if passed < 40.0 else 0.5 * decode
    alone_ttft, _, own_steps = prefill(fleet, fixed, scale, p, decode, batch_p, new, cached)
    ttft = max(total + rest, tiny)
    long = math.exp(-max(now - rows[AT, d], 0.0) / LONG_SPAN) * rows[LONG, d] / LONG_SPAN
    short = math.exp(-max(now - rows[AT, d], 0.0) / SHORT_SPAN) * rows[SHORT, d] / SHORT_SPAN
    batch = max(fleet.running[d] + fleet.foreign_running[d], 0.0) + 1.0
    context = max(fleet.context[d] + fleet.foreign_context[d], 0.0)
    context += requests.prompt[i] + 0.5 * requests.expected[i]
    tpot = max(roof_tpot, tiny)
    out[0] = math.log(ttft)
    out[1] = math.log(tpot)
    out[2] = math.log1p(new)
    out[3] = math.log1p(queued)
    out[4] = (queued + new) / fleet.chunk[p]
    out[5] = steps - out[4]
    out[6] = math.log(batch)
    out[7] = min(context / fleet.kv_capacity[d], 4.0)
    out[8] = min((fleet.kv_used[d] + fleet.foreign_context[d]) / fleet.kv_capacity[d], 4.0)
    out[9] = min(batch / fleet.max_seqs[d], 4.0)
    out[10] = rest / ttft
    out[11] = decode / ttft
    out[12] = min(since / decode, 100.0)
    out[13] = before / ttft
    out[14] = min(since / before, 5.0) if before > 0.0 else 5.0
    out[15] = computed / ttft
    out[16] = min(short, 2.0)
    out[17] = min(long, 2.0)
    out[18] = math.log(max(requests.expected[i], 1.0))
    out[19] = min(max(cached, 0.0) / max(requests.prompt[i], 1.0), 1.0)
    out[20] = min(max(fleet.age[d], 0.0), 10.0)
    out[21] = fleet.foreign_running[d] / batch
    out[22] = math.log(batch / (rows[BATCH, d] + 1.0))
    out[23] = math.log1p(min(max(now - requests.arrived[i], 0.0), 600.0))
    out[24] = math.log((left / max(begun, 1.0) + 1.0) / max(requests.expected[i], 1.0))
    out[25] = math.log(max(fleet.per_token[p] * fleet.chunk[p], tiny) / max(decode, tiny))
    out[BASE_TTFT] = ttft
    out[COMPUTED] = min(computed / ttft, 1.0)
    out[EXTRA] = max(alone_ttft - own_steps * decode, 0.0)
    out[ROOF_TTFT], out[ROOF_TPOT], out[USED] = roof_ttft, tpot, 0.0
    for k in range(out.shape[0]):
        if not math.isfinite(out[k]):
            out[k] = 0.0
    out[BASE_TTFT] = max(out[BASE_TTFT], tiny)
    out[ROOF_TPOT] = max(out[ROOF_TPOT], tiny)


def class_of(profile: Profile) -> str:
    """What makes replicas alike: GPU, model, precision, layout."""
    key = profile.key
    layout = f"tp{key.tp}" if key.tp > 1 else ""
    return "/".join(part for part in (key.gpu, key.model, key.precision, layout) if part)


class Pace:
    """What outcomes have taught about each replica: the factor on
    computing, the last end of a step, the share of
    time that prefill takes, the mean batch. Deterministic; one column of `rows` (6, m) a replica.
    """

    def __init__(self, replicas: int) -> None:
        self.rows = np.zeros((6, replicas))
        self.rows[COMPUTE] = 1.0
        self.rows[BOUNDARY] = -60.0
        self._compute = [PRIOR_VARIANCE] * replicas
        self.seen = [0] * replicas

    def copy_from(self, other: Pace, theirs: int, ours: int) -> None:
        """Take over what another one learned about one replica."""
        self.rows[:, ours] = other.rows[:, theirs]
        self._compute[ours] = other._compute[theirs]
        self.seen[ours] = other.seen[theirs]

    def ended(self, replica: int, at: float, batch: float) -> None:
        """An answer ended there: so did a step. `batch` ran when it was sent."""
        rows = self.rows
        rows[BOUNDARY, replica] = max(rows.item(BOUNDARY, replica), at)
        self.seen[replica] += 1
        rate = max(0.02, 1.0 / self.seen[replica])
        rows[BATCH, replica] += rate * (batch - rows.item(BATCH, replica))

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """A token came from each of these replicas at these times: a step of it had ended."""
        np.maximum.at(self.rows[BOUNDARY], np.array(replicas, np.int64), times)

    def prefilled(self, replica: int, at: float, cost: float) -> None:
        """A prompt has cost those who decode there so many seconds."""
        rows = self.rows
        gap = max(at - rows.item(AT, replica), 0.0)
        rows[SHORT, replica] = rows.item(SHORT, replica) * math.exp(-gap / SHORT_SPAN) + cost
        rows[LONG, replica] = rows.item(LONG, replica) * math.exp(-gap / LONG_SPAN) + cost
        rows[AT, replica] = max(rows.item(AT, replica), at)

    def learn_ttft(self, replica: int, basis: Sequence[float], error: float) -> None:
        """`error` is log(actual / predicted) of a first token predicted from `basis`."""
        share = basis[COMPUTED]
        variance = self._compute[replica]
        gain = variance * share / (variance * share * share + 0.15**2)
        factor = self.rows.item(COMPUTE, replica) * math.exp(gain * _clipped(error))
        self.rows[COMPUTE, replica] = min(max(factor, 0.2), 5.0)
        self._compute[replica] = min(variance * (1.0 - gain * share) + DRIFT, PRIOR_VARIANCE)


def _clipped(error: float) -> float:
    return min(max(error, -CLIP), CLIP)
