"""Profiles of replicas nobody took apart: from measured end-to-end points of many configurations.

A point is one closed-loop run: so many requests in flight, fixed lengths, mean TTFT and TPOT. One
model explains all points at once, so that a configuration without a single point (system, engine,
model, precision) still gets a profile: every constant of `domain.fleet.Profile` is what physics
says of it (bytes, FLOPs, layers, experts, layout), times an efficiency. Logs of efficiencies are
sums of effects (GPU, engine, precision, model, pairs of them, and time for each engine), shrunk to
none, for four groups: memory, compute, overhead and waiting.

In the steady state of a closed loop with b requests on a rank, each of `isl` prompt and `osl`
output tokens,

    TPOT = step(b, b (isl + osl / 2)) + g (b - 1) p / osl
    TTFT = waiting * (alpha p + beta b p + gamma step + delta) + what KV memory makes wait

What that leaves over is corrected by trees on the log residual (`Corrected`); profiles are the
formula's own constants.

Here p is the compute of one prompt: while one request decodes, the b - 1 others need a prefill
each; requests come in waves, as they began together. The steps' form is that of `Profile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey
from training.calibrate import Bools, Constants, Floats
from training.calibrate_tables import DEVICES, Source, device
from training.trace_sources import columns

TPOT_BAR, TTFT_BAR = 0.15, 0.25
"""Median relative error on left-out configurations."""

POINTS = Source(
    "engine_silicon_e2e: measured aggregated points of ai-dynamo/aiconfigurator 095f58a5 "
    "(mostly the public InferenceX benchmark)",
    "Apache-2.0 (NVIDIA)",
)


class Shape(NamedTuple):
    """A model: parameters (all, active a token, routed experts), layers, width, attention heads,
    KV bytes a token at 2 bytes, KV heads (0: MLA, not split over ranks), share of experts a token
    takes (0: dense).
    """

    total: float
    active: float
    routed: float
    layers: int
    width: int
    heads: int
    kv_bytes: float
    kv_heads: int
    taken: float


_DEEPSEEK = Shape(671e9, 37e9, 653e9, 61, 7168, 128, 61 * 576 * 2.0, 0, 8 / 256)
SHAPES = {
    "MiniMaxAI/MiniMax-M2.5": Shape(
        230e9, 10e9, 225e9, 62, 3072, 48, 62 * 8 * 128 * 4.0, 8, 8 / 256
    ),
    "Qwen/Qwen3-235B-A22B-FP8": Shape(
        235e9, 22e9, 227e9, 94, 4096, 64, 94 * 4 * 128 * 4.0, 4, 8 / 128
    ),
    "Qwen/Qwen3-32B": Shape(32.8e9, 32.8e9, 0, 64, 5120, 64, 64 * 8 * 128 * 4.0, 8, 0),
    "Qwen/Qwen3.5-397B-A17B": Shape(
        397e9, 17e9, 388e9, 60, 4096, 32, 15 * 2 * 256 * 4.0, 2, 10 / 512
    ),
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK,
    "meta-llama/Llama-3.1-70B": Shape(70.6e9, 70.6e9, 0, 80, 8192, 64, 80 * 8 * 128 * 4.0, 8, 0),
    "meta-llama/Llama-3.1-8B": Shape(8.03e9, 8.03e9, 0, 32, 4096, 32, 32 * 8 * 128 * 4.0, 8, 0),
    "moonshotai/Kimi-K2.5": Shape(1.04e12, 32e9, 1.02e12, 61, 7168, 64, 61 * 576 * 2.0, 0, 8 / 384),
    "openai/gpt-oss-120b": Shape(
        117e9, 5.1e9, 115e9, 36, 2880, 64, 0.5 * 36 * 8 * 64 * 4.0, 8, 4 / 128
    ),
    "zhipuai/GLM-5": Shape(744e9, 40e9, 725e9, 78, 6144, 64, 78 * 576 * 2.0, 0, 8 / 256),
}
"""By the models' published configurations; gpt-oss's KV counts half of its layers, the others have
a window of 128 tokens."""
_SAME = {
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B",
}
_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.56, "int4": 0.53}
LINK = 400e9
"""Bytes/s of an all-reduce between GPUs of a node, nominal; its efficiency is fitted."""


def architecture(model: str) -> str:
    """The name under which a model's shape stands. Raises: ConfigError for one unknown."""
    name = _SAME.get(model, model)
    if name not in SHAPES:
        raise ConfigError(f"unknown model {model!r}; known: {', '.join([*SHAPES, *_SAME])}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured points, (n,) each; `physics` (n, 8) are the constants of `Constants` at efficiency
    1, `batch` is a rank's, `tokens` those of a decode step over all ranks that share experts,
    `when` half years from the beginning of 2026 to the measurement, NaN where nobody wrote it down.
    """

    configuration: Sequence[tuple[str, str, str, str]]
    gpus: Floats
    ranks: Floats
    concurrency: Floats
    isl: Floats
    osl: Floats
    ttft: Floats
    tpot: Floats
    physics: Floats
    batch: Floats
    tokens: Floats
    slots: Floats
    when: Floats

    def __len__(self) -> int:
        return len(self.isl)


def read_points(path: Path) -> Points:
    """The aggregated points of a table with the columns of `engine_silicon_e2e`; runs that were
    written down twice once, also where the sizes of their layout are written in two ways.

    Raises: ConfigError naming the file and what is wrong with it; FileNotFoundError.
    """
    table = columns(path)
    wanted = (
        "system", "backend", "model", "precision", "mode", "isl", "osl", "concurrency", "tp_size",
        "attention_dp_size", "moe_tp_size", "moe_ep_size", "ttft_ms", "tpot_ms",
    )  # fmt: skip
    missing = [n for n in wanted if n not in table]
    if missing:
        raise ConfigError(f"{path}: a table of points has a column {missing[0]!r}")
    columns_of = [np.asarray(table[n]).tolist() for n in wanted]
    dates = np.asarray(table["measured_on"]).tolist() if "measured_on" in table else None
    known: dict[tuple[Any, ...], float] = {}
    for i, values in enumerate(zip(*columns_of, strict=True)):
        row = tuple(None if isinstance(x, float) and math.isnan(x) else x for x in values)
        if row[4] == "agg" and row[7]:
            when = math.nan if dates is None else half_years(dates[i])
            known[row] = float(np.fmin(known.get(row, math.nan), when))
    if not known:
        raise ConfigError(f"{path}: no aggregated point with a concurrency")
    runs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in sorted(known, key=str):
        layout_ = layout(SHAPES[architecture(row[2])], *(int(x or 0) for x in row[8:12]))
        numbers = (*row[5:8], *(round(x, 4) for x in row[12:]))
        first = runs.setdefault((*row[:4], *layout_, *numbers), row)
        known[first] = float(np.fmin(known[first], known[row]))
    rows = list(runs.values())
    return _points(rows, [known[row] for row in rows])


def half_years(day: Any) -> float:
    """Half years from the beginning of 2026 to an ISO date; NaN for none."""
    try:
        return (date.fromisoformat(str(day)[:10]) - date(2026, 1, 1)).days / 182.6
    except ValueError:
        return math.nan


def _points(rows: list[tuple[Any, ...]], when: list[float]) -> Points:
    configuration, gpus, ranks, physics, slots = [], [], [], [], []
    for row in rows:
        system, backend, model, precision = (row[0], row[1], row[2], row[3] or "bf16")
        shape = SHAPES[architecture(model)]
        n, dp = layout(shape, *(int(x or 0) for x in row[8:12]))
        configuration.append((system, backend, model, precision))
        gpus.append(n)
        ranks.append(dp)
        physics.append(list(by_physics(system, shape, precision, n, dp)))
        slots.append(kv_tokens(system, shape, precision, n, dp) / (row[5] + 0.5 * row[6]))
    numbers = np.array([[float(r[i]) for i in (5, 6, 7, 12, 13)] for r in rows])
    isl, osl, concurrency, ttft, tpot = numbers.T
    batch = concurrency / np.array(ranks, float)
    fits = np.minimum(np.maximum(batch, 1.0), np.maximum(np.array(slots), 1.0))
    return Points(
        configuration=configuration,
        gpus=np.array(gpus, float),
        ranks=np.array(ranks, float),
        concurrency=concurrency,
        isl=isl,
        osl=osl,
        ttft=ttft * 1e-3,
        tpot=tpot * 1e-3,
        physics=np.array(physics),
        batch=fits,
        tokens=fits * np.array(ranks),
        slots=np.array(slots),
        when=np.array(when),
    )


def layout(shape: Shape, tp: int, dp: int, moe_tp: int, moe_ep: int) -> tuple[int, int]:
    """(GPUs, attention ranks) of a replica.

    The set writes some sizes as products (tp 64 with experts split 8 x 8 is one node of 8 GPUs,
    which `concurrency / batch_size` confirms); those are undone.
    """
    tp, dp = max(tp, 1), max(dp, 1)
    if shape.taken == 0:
        return tp, 1
    if moe_tp == moe_ep > 1:
        return moe_tp, moe_tp if dp > 1 else 1
    if dp > 1 and tp == dp and moe_ep == tp * dp:
        return tp, dp
    return max(tp * dp, moe_tp * moe_ep, 1), dp


def by_physics(system: str, shape: Shape, precision: str, gpus: int, ranks: int) -> Constants:
    """The step time's constants at efficiency 1: bytes over bandwidth, FLOPs over peak.

    A rank's attention is split over gpus / ranks GPUs, experts over all of them. Lower precisions
    multiply at twice (FP8) or four times (FP4, on Blackwell only) the BF16 rate. A layer of experts
    takes twice the launches of a dense one, a layer that talks to other GPUs as well.
    """
    card = DEVICES[system.removesuffix("_sxm")]
    width = _BYTES[precision]
    split = gpus / ranks
    newer = system.startswith(("b", "gb"))
    rate = {"fp8": 2.0, "fp4": 4.0 if newer else 1.0}.get(precision, 1.0)
    talks = 1.0 if gpus > 1 else 0.0
    kv = _kv_bytes(shape, precision, split)
    return Constants(
        overhead=shape.layers * 1e-5 * (1.0 + talks) * (2.0 if shape.taken else 1.0),
        weights=(shape.total - shape.routed) * width / split / card.bandwidth,
        per_sequence=1e-5 + talks * shape.layers * 4.0 * shape.width / LINK,
        per_context=kv / card.bandwidth,
        per_token=2.0 * shape.active / (split * card.flops * rate),
        per_attention=4.0 * shape.layers * shape.heads * 128.0 / (split * card.flops),
        experts=max(shape.routed * width / gpus / card.bandwidth, 1e-12),
        expert_tokens=1.0 / shape.taken if shape.taken else 1.0,
    )


def kv_tokens(system: str, shape: Shape, precision: str, gpus: int, ranks: int) -> float:
    """Tokens of KV cache a rank has room for: 90 % of its GPUs' memory less the weights."""
    card, width, split = DEVICES[system.removesuffix("_sxm")], _BYTES[precision], gpus / ranks
    weights = (shape.total - shape.routed) * width / split + shape.routed * width / gpus
    kv = _kv_bytes(shape, precision, split)
    return max((0.9 * card.memory - weights) / kv, 1.0)


def _kv_bytes(shape: Shape, precision: str, split: float) -> float:
    """KV bytes a token on one GPU; checkpoints of 8 bits and fewer are served with 8-bit KV."""
    share = min(split, shape.kv_heads) if shape.kv_heads else 1.0
    return shape.kv_bytes / share * (1.0 if precision == "bf16" else 0.5)


# ---- the model

_GROUP = {  # which efficiency a constant takes
    "overhead": 2, "weights": 0, "per_sequence": 2, "per_context": 0, "per_token": 1,
    "per_attention": 1, "experts": 0, "expert_tokens": None,
}  # fmt: skip
GROUPS = 4
LOOP = ("mixing", "alone", "waves", "residue", "request")
"""g, alpha, beta, gamma and delta of the closed loop."""
_CENTRE = np.r_[
    np.log([1.0, 1.4, 1.2, 1.4, 2.0, 2.0, 1.4, 1.0, 0.7, 1.0, 0.3, 1.5, 0.02]), 0.1, 0.3, 0.2
]
_SPREAD = np.r_[[1.0, 0.3, 1.0, 0.7, 0.5, 1.0, 0.3, 1.0, 0.5, 0.5, 1.0, 0.7, 1.0], 0.1, 0.3, 0.3]
"""Priors of the constants' efficiencies and of the closed loop's, as logs, and of the powers of the
GPUs that share a layer by which memory, compute and overhead scale worse than they should."""
_FIXED = len(_CENTRE)
MAIN, PAIR, OWN = 0.3, 0.12, 0.2
"""Standard deviations of a main effect, of one of a pair and of what a configuration has to itself,
without which its many points would count as many witnesses for the others.
"""
NOISE = np.array([0.1, 0.2])
"""Of log TPOT and log TTFT, beyond which a point counts as an outlier."""


def effects(configuration: Sequence[tuple[str, str, str, str]]) -> list[list[str]]:
    """The names of each point's effects."""
    out = []
    for system, backend, model, precision in configuration:
        kind = architecture(model)
        out.append(
            [
                f"gpu {system}", f"engine {backend}", f"precision {precision}", f"model {kind}",
                f"pair {system} {backend}", f"pair {backend} {kind}",
                f"pair {backend} {precision}", f"pair {system} {precision}",
                f"pair {system} {kind}", f"pair {kind} {precision}",
                f"own {system} {backend} {kind} {precision}",
            ]
        )  # fmt: skip
    return out


def trend(configuration: tuple[str, str, str, str]) -> str:
    """The effect that grows with time: an engine's versions change."""
    return f"trend of {configuration[1]}"


class ClosedLoop:
    """The fitted model. `fit` learns; `predict` gives (TPOT, TTFT) of any points, `profile` the
    profile of any configuration.
    """

    def fit(self, points: Points, *, rounds: int = 20) -> ClosedLoop:
        """Maximum a posteriori over all effects by damped Gauss-Newton steps on robust weights."""
        names = sorted({n for some in effects(points.configuration) for n in some})
        names += sorted({trend(c) for c in points.configuration})
        self.names_ = {n: i for i, n in enumerate(names)}
        centre = np.concatenate([_CENTRE, np.zeros(GROUPS * len(names))])
        of_kind = {"pair": PAIR, "own": OWN}
        each = [of_kind.get(n.partition(" ")[0], MAIN) for n in names]
        spread = np.concatenate([_SPREAD, np.tile(each, GROUPS)])
        measured = np.log(np.stack([points.tpot, points.ttft], 1))
        member = self._member(points)
        rows, which = np.unique(member, axis=0, return_inverse=True)
        theta, damping = centre.copy(), 1e-2
        inputs = self._inputs(theta, points, member)
        logs = steady_state(inputs, points)
        cost = _cost(logs, measured, theta, centre, spread)
        moved = True
        for _ in range(rounds):
            if moved:
                error = (logs - measured) / NOISE
                root = (1.0 + error**2) ** -0.25  # its square weighs as soft L1 does
                slopes = _slopes(inputs, points) / NOISE[:, None] * root[:, :, None]
                pull, curve = _normal(slopes, error * root, rows, which.ravel())
                pull += (theta - centre) / spread**2
                curve += np.diag(1.0 / spread**2)
            trial = theta - np.linalg.solve(curve + damping * np.diag(np.diag(curve)), pull)
            next_inputs = self._inputs(trial, points, member)
            next_logs = steady_state(next_inputs, points)
            next_cost = _cost(next_logs, measured, trial, centre, spread)
            moved = next_cost < cost
            if moved:
                gained = (cost - next_cost) / cost
                theta, inputs, logs, cost = trial, next_inputs, next_logs, next_cost
                damping /= 4.0
                if gained < 3e-4:
                    break
            else:
                damping = min(damping * 8.0, 1e6)
        self.theta_ = theta
        return self

    def predict(self, points: Points) -> tuple[Floats, Floats]:
        """(TPOT, TTFT) in seconds, (n,) each; an effect never seen is none."""
        logs = steady_state(self._inputs(self.theta_, points, self._member(points)), points)
        return np.exp(logs[:, 0]), np.exp(logs[:, 1])

    def constants(self, points: Points) -> Floats:
        """The fitted constants of each point's replica, (n, 8) in the order of `Constants`."""
        return np.exp(self._log_constants(self.theta_, points, self._member(points)))

    def _member(self, points: Points) -> Floats:
        member = np.zeros((len(points), len(self.names_)))
        for i, some in enumerate(effects(points.configuration)):
            for name in some:
                if name in self.names_:
                    member[i, self.names_[name]] = 1.0
        for i, configuration in enumerate(points.configuration):
            name = trend(configuration)
            if name in self.names_ and math.isfinite(points.when[i]):
                member[i, self.names_[name]] = points.when[i]
        return member

    def _grouped(self, theta: Floats, member: Floats) -> Floats:
        out: Floats = member @ theta[_FIXED:].reshape(GROUPS, -1).T
        return out

    def _log_constants(self, theta: Floats, points: Points, member: Floats) -> Floats:
        group = self._grouped(theta, member)
        logs = np.log(points.physics) + theta[:8]
        split = np.log(points.gpus / points.ranks)
        for k, name in enumerate(Constants._fields):
            chosen = _GROUP[name]
            if chosen is not None:
                logs[:, k] += group[:, chosen] + theta[13 + chosen] * split
        return logs

    def _inputs(self, theta: Floats, points: Points, member: Floats) -> Floats:
        """What a point's steady state is made of, (n, 8 + 1 + 5): the constants, the efficiency of
        waiting, the closed loop's numbers.
        """
        logs = np.empty((len(points), len(Constants._fields) + 1 + len(LOOP)))
        logs[:, :8] = self._log_constants(theta, points, member)
        logs[:, 8] = self._grouped(theta, member)[:, 3]
        logs[:, 9:] = theta[8:13]
        out: Floats = np.exp(logs)
        return out


def steady_state(inputs: NDArray[Any], points: Points) -> NDArray[Any]:
    """Logs of TPOT and TTFT, (n, 2); analytic in the inputs, so that these may be complex."""
    o, w, s, c, t, a, x, h, waiting, mixing, alone, waves, residue, request = inputs.T
    b, isl, osl = points.batch, points.isl, points.osl
    memory, compute = w + c * b * (isl + 0.5 * osl), t * b
    larger = np.where(memory.real >= compute.real, memory, compute)
    step = o + s * b + x * points.tokens / (points.tokens + h) + larger
    prompt = t * isl + 0.5 * a * isl**2
    tpot = step + mixing * np.maximum(b - 1.0, 0.0) / osl * prompt
    quick = waiting * ((alone + waves * b) * prompt + residue * step + request)
    full = points.concurrency / points.ranks / np.maximum(points.slots, 1.0)
    ttft = quick + np.maximum(full - 1.0, 0.0) * osl * tpot
    logs: NDArray[Any] = np.log(np.stack([tpot, ttft], 1))
    return logs


def _slopes(inputs: Floats, points: Points) -> Floats:
    """Derivatives of `steady_state` by the fixed parameters and by each group's efficiency, (n, 2,
    16 + 4), from complex steps (Squire & Trapp, 1998).
    """
    by = np.empty((len(points), 2, inputs.shape[1]))
    for k in range(inputs.shape[1]):
        ahead = inputs.astype(complex)
        ahead[:, k] *= 1.0 + 1e-20j
        by[:, :, k] = steady_state(ahead, points).imag / 1e-20
    out = np.zeros((len(points), 2, _FIXED + GROUPS))
    out[:, :, :8], out[:, :, 8:13] = by[:, :, :8], by[:, :, 9:]
    out[:, :, _FIXED + 3] = by[:, :, 8]
    for k, name in enumerate(Constants._fields):
        chosen = _GROUP[name]
        if chosen is not None:
            out[:, :, _FIXED + chosen] += by[:, :, k]
    split = np.log(points.gpus / points.ranks)
    out[:, :, 13:16] = out[:, :, _FIXED : _FIXED + 3] * split[:, None, None]
    return out


def _normal(
    slopes: Floats, error: Floats, rows: Floats, which: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Gradient (p,) and Gauss-Newton matrix (p, p) by all parameters, for the derivatives of
    `_slopes` and errors (n, 2), where point i has the effects `rows[which[i]]`: what has the same
    effects is summed before it is spread over them.
    """
    order = np.argsort(which, kind="stable")
    ends = np.searchsorted(which[order], np.arange(1, len(rows)))
    stacks = [q.reshape(-1, q.shape[2]) for q in np.split(slopes[order], ends)]
    errors = [e.ravel() for e in np.split(error[order], ends)]
    pulls = np.stack([q.T @ e for q, e in zip(stacks, errors, strict=True)])
    grams = np.stack([q.T @ q for q in stacks])
    f, effects_ = _FIXED, GROUPS * rows.shape[1]
    across = np.einsum("ufg,ue->fge", grams[:, :f, f:], rows, optimize=True).reshape(f, effects_)
    among = np.einsum("ugh,ue,ud->gehd", grams[:, f:, f:], rows, rows, optimize=True)
    curve = np.block(
        [[grams[:, :f, :f].sum(0), across], [across.T, among.reshape(effects_, effects_)]]
    )
    return np.concatenate([pulls[:, :f].sum(0), (pulls[:, f:].T @ rows).ravel()]), curve


def _cost(logs: Floats, measured: Floats, theta: Floats, centre: Floats, spread: Floats) -> float:
    error = (logs - measured) / NOISE
    robust = float(np.sum(np.sqrt(1.0 + error**2) - 1.0))
    return robust + 0.5 * float(np.sum(((theta - centre) / spread) ** 2))


# ---- what the formula leaves over

BOOST: dict[str, Any] = {
    "objective": "l1", "num_leaves": 15, "learning_rate": 0.05, "min_child_samples": 20,
    "feature_fraction": 0.5, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 5.0,
    "verbose": -1, "num_threads": 1, "deterministic": True,
}  # fmt: skip
TREES, BAGS = 250, 2


class Corrected:
    """Physics first, then data: gradient-boosted trees on the log residual of the closed loop.

    Half of the correction starts from the loop at efficiency 1, half from the fitted one: the first
    carries over to what no effect was learned for, the second keeps what the effects know. The
    logs of the two are averaged, over `BAGS` bags each.
    """

    def fit(self, points: Points) -> Corrected:
        """Learn loop and residuals from points. Deterministic."""
        import lightgbm as lgb

        self.loops_ = [ClosedLoop().fit(points, rounds=0), ClosedLoop().fit(points)]
        configuration = zip(*points.configuration, strict=True)
        self.known_ = [{n: i for i, n in enumerate(sorted(set(some)))} for some in configuration]
        measured = np.log(np.stack([points.tpot, points.ttft], 1))
        self.trees_ = []
        for loop in self.loops_:
            logs = np.log(np.stack(loop.predict(points), 1))
            columns_ = self._features(points, logs)
            named = list(range(columns_.shape[1] - 3, columns_.shape[1]))
            for target in range(2):
                rest = measured[:, target] - logs[:, target]
                for seed in range(BAGS):
                    rows = lgb.Dataset(columns_, rest, categorical_feature=named)
                    self.trees_.append(lgb.train({**BOOST, "seed": seed}, rows, TREES))
        return self

    def predict(self, points: Points) -> tuple[Floats, Floats]:
        """(TPOT, TTFT) in seconds, (n,) each."""
        out = np.zeros((len(points), 2))
        trees = iter(self.trees_)
        for loop in self.loops_:
            logs = np.log(np.stack(loop.predict(points), 1))
            columns_ = self._features(points, logs)
            for target in range(2):
                for _ in range(BAGS):
                    more = np.asarray(next(trees).predict(columns_))
                    out[:, target] += (logs[:, target] + more) / (len(self.loops_) * BAGS)
        return np.exp(out[:, 0]), np.exp(out[:, 1])

    def _features(self, points: Points, logs: Floats) -> Floats:
        """(n, f): load, lengths, layout, the model's shape, the parts of a step by physics, the
        loop's own answer; GPU, engine and precision as categories last.
        """
        o, w, s, c, t, a, x, h = points.physics.T
        b, isl, osl = points.batch, points.isl, points.osl
        prompt = t * isl + 0.5 * a * isl**2
        experts = x * points.tokens / (points.tokens + h)
        memory = w + c * b * (isl + 0.5 * osl)
        step = o + s * b + memory + experts
        shapes = [SHAPES[architecture(m)] for _, _, m, _ in points.configuration]
        cards = [device(system) for system, _, _, _ in points.configuration]
        widths = [_BYTES[p] for _, _, _, p in points.configuration]
        numbers = [
            np.log(points.concurrency), np.log(b), np.log(isl), np.log(osl), np.log(points.gpus),
            points.ranks, np.log(points.concurrency / points.ranks / points.slots),
            *(np.log([getattr(q, f) for q in shapes]) for f in ("total", "active", "layers")),
            np.log([q.kv_bytes for q in shapes]), np.array([k.bandwidth for k in cards]),
            np.array(widths), logs[:, 0], logs[:, 1], np.log(prompt), np.log(step),
            np.log(prompt * b), np.log(prompt * b / osl), memory / step, experts / step,
            prompt * b / osl / step,
        ]  # fmt: skip
        names = [
            np.array([self.known_[k].get(row[k], -1) for row in points.configuration], float)
            for k in (0, 1, 3)
        ]
        return np.stack([*numbers, *names], 1)


# ---- what it is worth


def take(points: Points, chosen: Bools | Any) -> Points:
    """Some of the points."""
    index = np.arange(len(points))[chosen]
    fields = {
        name: getattr(points, name)[index]
        for name in Points.__dataclass_fields__
        if name != "configuration"
    }
    return Points(configuration=[points.configuration[i] for i in index], **fields)


def folds_of(points: Points, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold in which each point is left out with all of its configuration: by hash into `folds`,
    or each configuration on its own for 0.
    """
    if folds == 0:
        names = {c: k for k, c in enumerate(sorted(set(points.configuration)))}
        return np.array([names[c] for c in points.configuration], np.int64)
    words = ["|".join((str(seed), *c)).encode() for c in points.configuration]
    hashes = [int.from_bytes(blake2b(w, digest_size=4).digest(), "big") for w in words]
    return np.array(hashes, np.int64) % folds


def left_out_predictions(
    points: Points,
    *,
    folds: int = 0,
    seed: int = 1,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> tuple[Floats, Floats]:
    """(TPOT, TTFT) of every point by a model that saw no point of its configuration.

    The set holds some runs under two names of a model; a run that is left out is left out under
    both.
    """
    fold = folds_of(points, folds, seed)
    run = np.array(
        [
            hash((c[0], c[1], *(round(float(x), 7) for x in numbers)))
            for c, *numbers in zip(
                points.configuration, points.isl, points.osl, points.concurrency, points.ttft,
                points.tpot, strict=True,
            )
        ]
    )  # fmt: skip
    tpot, ttft = np.zeros(len(points)), np.zeros(len(points))
    for k in progress(np.unique(fold).tolist()):
        out = fold == k
        model = Corrected().fit(take(points, ~out & ~np.isin(run, run[out])))
        tpot[out], ttft[out] = model.predict(take(points, out))
    return tpot, ttft


def profile_of(constants: Floats, points: Points, i: int, uncertainty: float) -> Profile:
    """The profile of point i's replica."""
    system, backend, model, precision = points.configuration[i]
    n, ranks = int(points.gpus[i]), int(points.ranks[i])
    values = Constants(*constants[i].tolist())
    shape = SHAPES[architecture(model)]
    if not shape.taken:
        values = values._replace(experts=0.0, expert_tokens=1.0)
    values = values._replace(expert_tokens=values.expert_tokens / ranks)
    card = device(system)
    return Profile(
        key=ProfileKey(gpu=system, engine=backend, model=model, precision=precision, tp=n, ep=1),
        **values._asdict(),
        chunk=8192,
        max_seqs=512,
        kv_capacity=kv_tokens(system, shape, precision, n, ranks),
        max_context=32768,
        price=card.price * n,
        power=card.power * n,
        uncertainty=uncertainty,
    )
