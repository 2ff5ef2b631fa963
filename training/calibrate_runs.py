"""Fitting a profile to whole requests on one replica: when each came, its tokens, TTFT and E2E.

Nobody wrote down the steps, so the simulator's own physics (`backends.sim.replica`) lives the run
through and the constants are those that make it agree with what was measured, in log TTFT and log
E2E. A run tells some constants badly (at one batch size, `overhead` and `weights` cannot be told
apart), so each has a prior: the roofline of the data sheet, within a factor.

The same fits logs of vLLM (`engine_vllm_request_logs`) and decision logs of the gateway.
"""

# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from backends.sim.replica import (
    FINISHED,
    FIRST_TOKEN,
    Physics,
    enter,
    fire,
    idle,
    next_event,
    physics,
    plan,
    set_job,
)
from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey, ReplicaSpec
from training.calibrate import Bools, Floats
from training.calibrate_tables import Source, device
from training.trace_sources import columns

FITTED = (
    "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention",
    "kv_capacity",
)  # fmt: skip
DELAY = 0.02
"""Seconds between the engine's token and the log's, before anything was fitted: tokenisation, a
scheduler that runs a step ahead, the way back. Fitted beside the profile, no part of it."""
PRIOR = (0.7, 0.25, 1.0, 0.5, 0.5, 0.7, 0.15, 1.0)
"""Standard deviations of the logs of `FITTED` and of the delay around the start: a data sheet knows
how many bytes there are, less well how fast they move, and of overheads the order of magnitude.
"""
WIDE = (2.0, 1.0, 2.0, 2.0, 1.0, 2.0, 0.1, 1.0)
"""The same where there is no data sheet: orders of magnitude."""
NOISE = 0.1
"""Standard deviation of a request's log TTFT and log E2E that the physics does not explain."""
EVALUATIONS = 600
"""Most runs lived through in a fit; one of 300 requests takes 3 ms."""
BAR = 0.09
"""Median relative error of TTFT and of E2E that a run may have (BLIS: 7 to 9 % over 36 runs)."""
SEEN = 0.2
"""Share of a run, its first requests, that its constants may be fitted to."""

REQUEST_LOGS = Source(
    "engine_vllm_request_logs: vLLM 0.19.0 runs of casys-kaist/LLMServingSim 5daddb21, "
    "bench/examples",
    "MIT, copyright 2024 CASYS Lab at KAIST",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRun:
    """Requests of one replica in order of arrival, (n,): seconds from the first, tokens; NaN where
    a time was not measured.
    """

    name: str
    at: Floats
    prompt: Floats
    output: Floats
    ttft: Floats
    e2e: Floats

    def __post_init__(self) -> None:
        if not len(self.at):
            raise ConfigError(f"{self.name}: a run without requests")
        if np.any(np.diff(self.at) < 0) or self.at[0] < 0:
            raise ConfigError(f"{self.name}: arrivals must ascend from 0 s")
        for name in ("prompt", "output"):
            if not np.all(getattr(self, name) >= 1):
                raise ConfigError(f"{self.name}: {name} tokens must be at least 1")


class Lived(NamedTuple):
    """What the physics makes of a run, (n,), seconds; inf for a request that never fits."""

    ttft: Floats
    e2e: Floats
    queue_at: Floats  # (k,) times of events
    queue: Floats  # (k,) requests that wait after them


class FittedRun(NamedTuple):
    """A replica's profile and the delay of its tokens, in seconds."""

    profile: Profile
    delay: float


@njit(cache=True, error_model="numpy")
def _play(
    ph: Physics, at: Floats, first: Floats, done: Floats, seen_at: Floats, seen: Floats
) -> int:
    """Drive replica 0 through arrivals; writes when each request gave its first token and ended."""
    room = 2 * ph.heap_key.shape[1]
    kinds, jobs = np.zeros(room, np.int64), np.zeros(room, np.int64)
    i, looks = 0, 0
    while True:
        now, _ = next_event(ph)
        if i < len(at) and at[i] <= now:
            now = at[i]
            if enter(ph, 0, i, now) and idle(ph, 0):
                plan(ph, 0, now)
            i += 1
        elif now == np.inf:
            return looks
        else:
            for k in range(fire(ph, 0, kinds, jobs)):
                if kinds[k] == FIRST_TOKEN:
                    first[jobs[k]] = now
                elif kinds[k] == FINISHED:
                    done[jobs[k]] = now
            plan(ph, 0, now)
        if looks < len(seen):
            seen_at[looks] = now
            seen[looks] = ph.replica[0].n_waiting
            looks += 1


def live(fitted: FittedRun, run: RequestRun) -> Lived:
    """The run on an idle replica of that profile, output lengths given."""
    profile, delay = fitted
    spec = ReplicaSpec(name="replica", variant="variant", profile=profile)
    n = len(run.at)
    ph = physics([spec], n)
    for j in range(n):
        set_job(ph, j, int(run.prompt[j]), int(run.output[j]), -1, 0, 0)
    first, done = np.full(n, np.inf), np.full(n, np.inf)
    at, queue = np.zeros(16 * n), np.zeros(16 * n)
    looks = _play(ph, run.at, first, done, at, queue)
    return Lived(first - run.at + delay, done - run.at + delay, at[:looks], queue[:looks])


def moved(start: Profile, logs: Floats) -> FittedRun:
    """The start with its fitted fields, and the delay, multiplied by the exponentials of `logs`."""
    change = {
        name: getattr(start, name) * math.exp(x)
        for name, x in zip(FITTED, logs[:-1].tolist(), strict=True)
    }
    return FittedRun(replace(start, **change), DELAY * math.exp(logs[-1]))


def fit_runs(
    runs: Sequence[RequestRun],
    seen: Sequence[Bools],
    start: Profile,
    *,
    priors: Sequence[float] = PRIOR,
    evaluations: int = EVALUATIONS,
) -> FittedRun:
    """The profile that makes the seen requests of the runs come out as measured.

    Maximum a posteriori over the logs of `FITTED` with a robust loss, by the simplex method: the
    physics jumps where a request just fits or does not, so that differences mislead. Arrivals and
    lengths of unseen requests are inputs, their times are not read. Deterministic.
    """
    from scipy.optimize import minimize

    if not any(s.any() for s in seen):
        raise ConfigError(f"{runs[0].name}: no request to fit to")

    spread = np.array(priors)

    def cost(logs: Floats) -> float:
        fitted = moved(start, logs)
        total = 0.5 * float(np.sum((logs / spread) ** 2))
        for run, chosen in zip(runs, seen, strict=True):
            lived = live(fitted, run)
            weight = NOISE * math.sqrt(max(chosen.sum() / 20.0, 1.0))
            for got, measured in ((lived.ttft, run.ttft), (lived.e2e, run.e2e)):
                known = chosen & np.isfinite(measured)
                ratio = np.log(np.minimum(got[known], 1e6) / measured[known]) / weight
                total += float(np.sum(np.sqrt(1.0 + ratio**2) - 1.0))
        return total

    corner = np.zeros(len(FITTED) + 1)
    for width in (0.5, 0.15):  # the second simplex starts afresh where the first collapsed
        simplex = np.vstack([corner, corner + width * np.diag(spread)])
        found = minimize(
            cost,
            corner,
            method="Nelder-Mead",
            options={
                "initial_simplex": simplex,
                "maxfev": evaluations // 2,
                "xatol": 1e-3,
                "fatol": 1e-3,
                "adaptive": True,
            },
        )
        corner = found.x
    return moved(start, corner)


def median_errors(lived: Lived, run: RequestRun, chosen: Bools) -> tuple[float, float]:
    """Median |predicted / measured - 1| of TTFT and E2E over the chosen requests."""
    out = []
    for got, measured in ((lived.ttft, run.ttft), (lived.e2e, run.e2e)):
        known = chosen & np.isfinite(measured)
        out.append(float(np.median(np.abs(got[known] / measured[known] - 1.0))))
    return out[0], out[1]


# ---- logs of vLLM


class Shape(NamedTuple):
    """A dense decoder: parameters, layers, heads, KV heads, head dimension."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "meta-llama/Llama-3.1-8B": Shape(8.03e9, 32, 32, 8, 128),
    "Qwen/Qwen3-32B": Shape(32.8e9, 64, 64, 8, 128),
}
"""By the models' published configurations."""
BUDGET = 2048
MAX_SEQS = {"RTX4090": 256}
"""max_num_batched_tokens and max_num_seqs of the runs, from the set's README; else 128."""


def vllm_runs(data: Path) -> list[tuple[RequestRun, Profile]]:
    """The runs of `engine_vllm_request_logs` and the roofline each starts from.

    Raises: FileNotFoundError that says where it looked.
    """
    table = columns(data / "engine_vllm_request_logs" / "requests.parquet")
    names = zip(table["gpu"].tolist(), table["model"].tolist(), table["tp"].tolist(), strict=True)
    out = []
    for gpu, model, tp in sorted(set(names)):
        chosen = (table["gpu"] == gpu) & (table["model"] == model) & (table["tp"] == tp)
        index = np.flatnonzero(chosen)
        index = index[np.argsort(table["arrival_s"][index], kind="stable")]
        run = RequestRun(
            name=f"{gpu} {model} tp{tp}",
            at=table["arrival_s"][index].astype(float),
            prompt=table["input_tokens"][index].astype(float),
            output=table["output_tokens"][index].astype(float),
            ttft=table["ttft_s"][index].astype(float),
            e2e=table["e2e_s"][index].astype(float),
        )
        out.append((run, roofline(gpu, model, int(tp), MAX_SEQS.get(gpu, 128))))
    return out


def roofline(gpu: str, model: str, tp: int, max_seqs: int) -> Profile:
    """What the data sheet says of a dense BF16 model under vLLM on that many GPUs."""
    card, shape = device(gpu), SHAPES[model]
    profile = Profile.dense(
        key=ProfileKey(gpu=gpu.lower(), engine="vllm", model=model, precision="bf16", tp=tp),
        parameters=shape.parameters,
        bytes_per_parameter=2.0,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        heads=shape.heads,
        peak_flops=card.flops * tp,
        bandwidth=card.bandwidth * tp,
        memory_bytes=card.memory * tp,
        chunk=BUDGET,
        max_seqs=max_seqs,
        max_context=32768,
    )
    return replace(profile, power=card.power * tp, price=card.price * tp)


# ---- decision logs


def from_decisions(records: Iterable[dict[str, Any]], where: str) -> dict[str, RequestRun]:
    """A run per replica of what a gateway's decision log tells: sent when, tokens, TTFT and E2E
    from then on. Prompt tokens found in a cache are left out; an answer that broke off counts as
    far as it came, without an E2E.

    Raises: ConfigError naming `where` for a log without a usable record.
    """
    rows: dict[str, list[tuple[float, float, float, float, float]]] = {}
    for record in records:
        outcome = record.get("outcome") or {}
        replica, sent = record.get("replica"), outcome.get("sent")
        tokens, prompt = outcome.get("completion_tokens"), outcome.get("prompt_tokens")
        if not replica or sent is None or not tokens or not prompt or record.get("attempts") != 1:
            continue
        new = max(prompt - (outcome.get("cached_tokens") or 0.0), 1.0)
        ttft = outcome.get("ttft")
        whole = outcome.get("cause") == "finished"
        rows.setdefault(replica, []).append(
            (
                record["at"] + sent,
                new,
                tokens,
                math.nan if ttft is None else max(ttft - sent, 1e-6),
                outcome["e2e"] - sent if whole else math.nan,
            )
        )
    if not rows:
        raise ConfigError(f"{where}: no request that a replica answered at the first attempt")
    out = {}
    for replica, some in sorted(rows.items()):
        at, prompt, output, ttft, e2e = np.array(sorted(some)).T
        out[replica] = RequestRun(
            name=replica, at=at - at[0], prompt=prompt, output=output, ttft=ttft, e2e=e2e
        )
    return out
