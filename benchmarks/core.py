"""CPU time of the decision core alone: an arrival decided and booked, plus its end settled.

    python benchmarks/core.py [--policy best_fit] [--json]
    python benchmarks/core.py --predictors learned [--latency latency.npz]
    python benchmarks/core.py --predictors learned --refit 20

Prints microseconds of CPU (median of repetitions, with min and max) at 8 and 64 replicas,
unsaturated and with 100, 1,000 and 10,000 waiting. With learned predictors (length, quality and
latency artifacts; those that ship unless `--latency` names one) it does so for prompts of 100 bytes
and of 1 KB, the length forecast included, what the gateway pays for a prompt's features printed
beside it. `--refit` gives so many seconds of 1,000 decisions a second by the clock, first alone,
then beside a background fit of the latency model on a full window, started again as it ends.
Trust ratios more than single figures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import TypeAdapter

from domain.events import Arrived, AttemptEnded, Commit, Committed, FirstToken, Send
from domain.fleet import FleetSpec, Profile, ProfileKey, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.ports import Estimator
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from policies.config import PolicyConfig
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.estimator import BaselineEstimator
from predictors.features import PromptFacts, encode
from predictors.latency import BASE_TTFT, ROOF_TPOT
from predictors.learned import PACKAGED, LearnedEstimator, load_parts, packaged_latency
from training.latency_data import frame_of, save_window

SLO = Slo(ttft=2.0, tpot=0.2, e2e=600.0)  # type: ignore[arg-type]
SIZES = (100, 1024)
"""Bytes of a prompt where text is looked at."""
PROMPTS = 256
"""Different prompts, taken in turn."""
PER_CLASS = 4000
"""Outcomes of each class of replica that a full window holds (`sluice.refit`)."""
RATE = 1000.0
"""Decisions a second beside a fit."""


def mixed_fleet(m: int, max_seqs: int = 64) -> FleetSpec:
    """M replicas of four speeds, two variants of one model."""
    speeds = (0.6, 1.0, 1.7, 2.4)
    replicas = tuple(
        ReplicaSpec(
            name=f"r{i}",
            variant="full" if i % 2 else "int8",
            profile=Profile(
                key=ProfileKey(gpu=f"gpu-{i % 4}"),
                weights=0.012 * speeds[i % 4],
                per_token=6e-5 * speeds[i % 4],
                max_seqs=max_seqs,
            ),
        )
        for i in range(m)
    )
    return FleetSpec(
        replicas=replicas,
        variants=(Variant(name="full", model="m"), Variant(name="int8", model="m")),
    )


def policy(name: str, **kwargs: float) -> PolicyConfig:
    """The configuration of that policy with its defaults."""
    return TypeAdapter(PolicyConfig).validate_python({"kind": name} | kwargs)


def prompts(size: int) -> list[str]:
    """Texts of `size` bytes, cut from this repository's documents at random places."""
    text = "".join(path.read_text() for path in sorted(ROOT.glob("**/README.md")))
    draw = random.Random(0)
    starts = [draw.randrange(len(text) - size) for _ in range(PROMPTS)]
    return [text[start : start + size] for start in starts]


def features_of(size: int) -> list[tuple[float, ...]]:
    """What the gateway makes of them."""
    return [tuple(encode(PromptFacts(text=text)).tolist()) for text in prompts(size)]


def features_us(size: int) -> float:
    """Microseconds of CPU for the features of one prompt."""
    texts = prompts(size)
    start = time.process_time()
    for text in texts:
        tuple(encode(PromptFacts(text=text)).tolist())
    return (time.process_time() - start) / len(texts) * 1e6


def estimators(kind: str, latency: Path | None) -> Callable[[], Estimator]:
    """A maker of estimators; the learned one's artifacts are read once."""
    if kind == "baseline":
        return BaselineEstimator
    latency = packaged_latency() if latency is None else latency
    if latency is None:
        raise SystemExit(
            "no latency artifact ships: give --latency FILE "
            "(python -m training.fit_latency --simulate --out FILE makes one)"
        )
    parts = load_parts(PACKAGED / "length.npz", PACKAGED / "quality.npz", latency)
    if None in parts:
        raise SystemExit("an artifact cannot be used")
    return lambda: LearnedEstimator(*parts)


def new_core(name: str, m: int, estimator: Estimator, max_seqs: int = 64) -> DecisionCore:
    """A fresh core without quotas."""
    return build_core(
        policy(name),
        fleet=mixed_fleet(m, max_seqs),
        estimator=estimator,
        tenants=[Tenant(name=f"t{i}") for i in range(4)],
        classes=[SloClass(name="standard", rank=1, sheddable=False, max_wait=1e6, patience=1e6)],  # type: ignore[arg-type]
    )


class Load:
    """A core with `waiting` requests held all the while, or with four open a replica; `step` is one
    more arrival, its first token, and the end of the oldest.
    """

    def __init__(
        self,
        name: str,
        m: int,
        waiting: int,
        estimator: Estimator,
        features: list[tuple[float, ...]],
    ) -> None:
        self.core = new_core(name, m, estimator, max_seqs=4 if waiting else 64)
        self._limited = not waiting
        self._features = features
        self._count = 0
        self.fresh: list[Send] = []
        now = 0.0
        for _ in range(waiting + 4 * m):
            now += 1e-4
            sent = self._arrive(now)
            if not waiting:
                self._first(sent[-1], now)
        self.now = now

    def _arrive(self, now: float) -> list[Send]:
        i, self._count = self._count, self._count + 1
        asked = InferenceRequest(
            id=f"req-{i}",
            tenant=f"t{i % 4}",
            model="m",
            prompt_tokens=400.0,
            max_tokens=200.0,
            slo=SLO if self._limited else Slo(),
            class_name="standard",
            tie=i * 7919 % 2**31,
            features=self._features[i % len(self._features)] if self._features else (),
        )
        sent = answer(self.core, self.core.handle(Arrived(now, asked)), now)
        self.fresh += sent
        return sent

    def _first(self, send: Send, now: float) -> None:
        self.fresh += answer(
            self.core, self.core.handle(FirstToken(now, send.id, send.attempt)), now
        )

    def step(self, now: float) -> Send:
        """One request more and one less; the one that ended."""
        self._arrive(now)
        send = self.fresh.pop(0)
        self._first(self.fresh[-1] if self._limited else send, now)
        end = AttemptEnded(now + 0.5e-3, send.id, send.attempt, Cause.FINISHED, USAGE, now)
        self.fresh += answer(self.core, self.core.handle(end), now)
        self.now = now
        return send


def answer(core: DecisionCore, actions: list, now: float) -> list[Send]:
    """Play the memory store; returns what is sent."""
    sends = []
    for action in actions:
        if type(action) is Commit and action.route is not None:
            sends += answer(core, core.handle(Committed(now, action.id, action.attempt)), now)
        elif type(action) is Send:
            sends.append(action)
    return sends


USAGE = Usage(prompt=400, completion=100, source=UsageSource.ENGINE)


def arrivals_us(
    name: str,
    m: int,
    waiting: int,
    count: int,
    estimator: Estimator,
    features: list[tuple[float, ...]],
) -> float:
    """Microseconds of CPU per (arrival + first token + end), with `waiting` requests held all the
    while.
    """
    load = Load(name, m, waiting, estimator, features)
    held = len(load.core.queue)
    start = time.process_time()
    for _ in range(count):
        load.step(load.now + 1e-3)
    spent = time.process_time() - start
    now = len(load.core.queue)
    if abs(now - held) > 4 * m or (held > 0) != (waiting > 0):
        raise SystemExit(f"the queue went from {held} to {now}: not what is measured")
    return spent / count * 1e6


# ---- beside a fit


def full_window(load: Load, path: Path) -> int:
    """A window as a gateway keeps it, from rows that this core decided on and times drawn around
    their bases; its outcomes.
    """
    sends = [load.step(load.now + 1e-3) for _ in range(400)]
    bases = [np.array(s.prediction.basis) for s in sends if s.prediction.basis]
    rng = np.random.default_rng(0)
    rows = []
    for k in range(4):
        for _ in range(PER_CLASS):
            base = bases[int(rng.integers(len(bases)))]
            off = np.exp(0.2 * rng.standard_normal(2) + 0.1 * np.tanh(base[:2]))
            ttft, tpot = base[BASE_TTFT] * off[0], base[ROOF_TPOT] * off[1]
            rows.append((base.tolist(), float(ttft), float(tpot), 100.0, f"gpu-{k}"))
    save_window(frame_of(rows), path)
    return len(rows)


@contextmanager
def fitting(window: Path) -> Iterator[Callable[[], int]]:
    """A fit that runs in a process of its own, started again as it ends; yields how many ended."""
    words = ["-m", "training.fit_latency", "--window", str(window), "--nice", "10"]
    words += ["--out", str(window.with_name("latency.npz"))]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    child, ended = start(), 0

    def look() -> int:
        nonlocal child, ended
        if child.poll() is not None:
            ended += 1
            child = start()
        return ended

    try:
        yield look
    finally:
        child.kill()
        child.wait()


def paced(load: Load, seconds: float, look: Callable[[], int] | None) -> dict[str, float]:
    """`RATE` steps a second by the clock for so long: how many came in time and how late they were
    done, milliseconds after they were due.
    """
    count = round(seconds * RATE)
    late = np.zeros(count)
    spent = time.process_time()
    first = time.perf_counter()
    for i in range(count):
        due = first + i / RATE
        while (ahead := due - time.perf_counter()) > 0:
            time.sleep(ahead)
        load.step(load.now + 1.0 / RATE)
        late[i] = time.perf_counter() - due
        if look is not None and i % 200 == 0:
            look()
    wall = time.perf_counter() - first
    p50, p99 = (1e3 * np.quantile(late, [0.5, 0.99])).tolist()
    return {
        "decisions_per_s": round(count / wall, 1),
        "cpu_us": round((time.process_time() - spent) / count * 1e6, 1),
        "late_p50_ms": round(p50, 3),
        "late_p99_ms": round(p99, 3),
        "late_max_ms": round(1e3 * float(late.max()), 2),
        "fits": 0 if look is None else look(),
    }


def beside_refit(name: str, make: Callable[[], Estimator], seconds: float, replicas: int) -> None:
    """Print both halves."""
    load = Load(name, replicas, 0, make(), features_of(SIZES[-1]))
    with tempfile.TemporaryDirectory(prefix="sluice-core-") as folder:
        window = Path(folder) / "window.npz"
        rows = full_window(load, window)
        for what in ("alone", f"beside a fit on {rows} outcomes"):
            with nullcontext() if what == "alone" else fitting(window) as look:
                print(f"{replicas} replicas, {what}: {json.dumps(paced(load, seconds, look))}")


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="best_fit")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100, 1000, 10_000])
    parser.add_argument("--predictors", choices=["baseline", "learned"], default="baseline")
    parser.add_argument("--latency", type=Path, help="latency artifact (default: what ships)")
    parser.add_argument("--refit", type=float, metavar="SECONDS", help="beside a background fit")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    make = estimators(args.predictors, args.latency)
    cold = time.perf_counter()
    sizes = SIZES if args.predictors == "learned" else (0,)
    arrivals_us(args.policy, 8, 0, 10, make(), features_of(sizes[-1]) if sizes[-1] else [])
    warm_s = time.perf_counter() - cold
    if args.refit:
        for m in args.replicas:
            beside_refit(args.policy, make, args.refit, m)
        return 0
    rows = []
    for size in sizes:
        features = features_of(size) if size else []
        for m in args.replicas:
            for waiting in args.waiting:
                values = [
                    arrivals_us(args.policy, m, waiting, args.count, make(), features)
                    for _ in range(args.repeat)
                ]
                rows.append(
                    {
                        "replicas": m,
                        "waiting": waiting,
                        "bytes": size,
                        "us": statistics.median(values),
                        "min": min(values),
                        "max": max(values),
                    }
                )
    seen = {size: sorted(features_us(size) for _ in range(args.repeat)) for size in sizes if size}
    if args.json:
        found = {"policy": args.policy, "predictors": args.predictors, "first_call_s": warm_s}
        print(json.dumps(found | {"rows": rows, "features_us": seen}))
        return 0
    print(f"{args.policy}, {args.predictors} predictors: kernels ready in {warm_s:.1f} s")
    for row in rows:
        prompt = "  prompts of {bytes:4d} bytes".format(**row) if row["bytes"] else ""
        print("{replicas:3d} replicas {waiting:6d} waiting".format(**row) + prompt, end="")
        print("  {us:7.1f} us [{min:.1f}-{max:.1f}]".format(**row))
    for size, values in seen.items():
        middle = statistics.median(values)
        print(f"features of {size} bytes: {middle:.1f} us [{values[0]:.1f}-{values[-1]:.1f}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
