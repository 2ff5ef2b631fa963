"""Random but legal states of requests, fleet and estimates, as the columns that kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from domain.columns import (
    LOAD_GRID,
    EstimateColumns,
    FleetColumns,
    RequestColumns,
    Routes,
    estimate_columns,
    fleet_columns,
    request_columns,
    route_table,
    scores,
)
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from policies import kernels


@dataclass
class State:
    """Everything that a scorer's kernel reads, beside its parameters."""

    requests: RequestColumns
    fleet: FleetColumns
    routes: Routes
    estimates: EstimateColumns
    mask: np.ndarray
    draws: np.ndarray
    now: float

    def score(self, scorer, kernel=None) -> np.ndarray:
        """Route scores (n, c) of that scorer, or of another kernel with its parameters."""
        out = scores(*self.mask.shape)
        (kernel or scorer.kernel)(*self.arguments(scorer), out)
        return out.route

    def held(self, scorer) -> np.ndarray:
        """Until when each request (n,) is held back, -inf where it is not."""
        out = scores(*self.mask.shape)
        scorer.kernel(*self.arguments(scorer), out)
        return out.hold

    def refusal(self, scorer) -> np.ndarray:
        """The score of refusing each request (n,), -inf where the scorer has no say."""
        out = scores(*self.mask.shape)
        scorer.kernel(*self.arguments(scorer), out)
        return out.shed

    def arguments(self, scorer) -> tuple:
        """A kernel's arguments up to the output."""
        return (
            scorer.params,
            self.requests,
            self.fleet,
            self.routes,
            self.estimates,
            self.mask,
            self.draws,
            self.now,
        )

    def arrays(self) -> list[np.ndarray]:
        """Every input array."""
        groups = (self.requests, self.fleet, self.routes, self.estimates)
        return [*(a for group in groups for a in group), self.mask, self.draws]


def random_spec(rng: np.random.Generator, m: int, *, split: bool = False) -> FleetSpec:
    """M replicas of random speed, two variants; with `split` the last two are a prefill/decode
    pair.
    """
    replicas = []
    for i in range(m):
        phase = "both"
        if split and i >= m - 2:
            phase = "prefill" if i == m - 2 else "decode"
        low = float(rng.choice([0.0, 200.0, 900.0]))
        replicas.append(
            ReplicaSpec(
                name=f"r{i}",
                variant="full" if split or i % 2 else "int8",
                phase=phase,
                weight=float(rng.uniform(0.5, 3.0)),
                pool_low=low,
                pool_high=low + float(rng.uniform(300.0, 2000.0)),
                profile=Profile(
                    weights=float(rng.uniform(0.005, 0.03)),
                    per_token=float(rng.uniform(3e-5, 3e-4)),
                    experts=0.004 * (i % 3),
                    expert_tokens=16.0,
                    chunk=int(rng.choice([256, 512, 1024])),
                    max_seqs=32,
                    kv_capacity=40_000.0,
                    price=float(rng.uniform(0.5, 4.0)),
                ),
            )
        )
    variants = (Variant(name="full", model="m"), Variant(name="int8", model="m", quality=0.7))
    return FleetSpec(replicas=tuple(replicas), variants=variants)


def load_fleet(rng: np.random.Generator, fleet: FleetColumns, now: float, most: int = 6) -> None:
    """Books up to `most` random streams on each replica, some decoding, and foreign load."""
    slot = 0
    for r in range(len(fleet.usable)):
        for _ in range(int(rng.integers(0, most + 1))):
            slot += 1
            prompt, expected = float(rng.integers(1, 1500)), float(rng.integers(1, 400))
            began = now - float(rng.uniform(0.1, 5.0))
            limited = rng.random() < 0.8
            kernels.book(
                fleet,
                r,
                r,
                slot,
                prompt,
                float(rng.integers(0, int(prompt) + 1)),
                expected,
                float(rng.uniform(0.02, 0.1)) if limited else np.inf,
                began + float(rng.uniform(0.2, 3.0)) if limited else np.inf,
                began + float(rng.uniform(1.0, 30.0)) if rng.random() < 0.4 else np.inf,
                began,
            )
            if rng.random() < 0.8:
                kernels.first_token(fleet, r, r, slot, began + float(rng.uniform(0.0, 0.1)))
                seen = np.array([rng.integers(1, 300)])
                kernels.progress_many(fleet, np.array([r]), np.array([slot]), seen, now)
        fleet.dispatched[r] += float(rng.integers(0, 50))
        if rng.random() < 0.5:
            fleet.foreign_running[r] = float(rng.integers(0, 5))
            fleet.foreign_context[r] = float(rng.integers(0, 4000))
            fleet.foreign_backlog[r] = float(rng.integers(0, 500))


def random_state(
    seed: int, n: int = 3, m: int = 5, *, split: bool = False, masked: float = 0.75
) -> State:
    """A random state; about `masked` of the pairs may be chosen."""
    rng = np.random.default_rng(seed)
    now = 100.0
    spec = random_spec(rng, m, split=split)
    fleet = fleet_columns(spec.replicas)
    load_fleet(rng, fleet, now)
    routes = route_table(spec).routes
    c = len(routes.decode)
    requests = request_columns(n)
    requests.prompt[:] = rng.integers(1, 2000, n)
    requests.expected[:] = rng.integers(1, 500, n)
    requests.length_q[:] = np.sort(rng.uniform(1, 800, requests.length_q.shape), axis=1)
    requests.arrived[:] = now - rng.uniform(0, 1, n)
    requests.ttft[:] = np.where(rng.random(n) < 0.7, rng.uniform(0.2, 4, n), np.inf)
    requests.tpot[:] = np.where(rng.random(n) < 0.7, rng.uniform(0.02, 0.1, n), np.inf)
    requests.e2e[:] = np.where(rng.random(n) < 0.5, rng.uniform(2, 40, n), np.inf)
    requests.weight[:] = rng.uniform(0.5, 2.0, n)
    requests.tie[:] = rng.integers(0, 2**31, n)
    estimates = estimate_columns(n, c)
    share = rng.choice([0.0, 0.0, 0.5, 0.9], (n, c))
    estimates.cached[:] = np.floor(share * (requests.prompt[:, None] - 1))
    estimates.sticky[:] = rng.random((n, c)) < 0.2
    estimates.p_slo[:] = rng.random((n, c))
    estimates.p_raw[:] = estimates.p_slo
    estimates.quality[:] = rng.random((n, c))
    estimates.wait[:] = rng.uniform(0, 1, (n, c))
    spread = np.exp(0.4 * (LOAD_GRID - 0.5))
    estimates.ttft[:] = rng.uniform(0.05, 3, (n, c, 1)) * spread
    estimates.tpot[:] = rng.uniform(0.01, 0.1, (n, c, 1)) * spread
    return State(
        requests=requests,
        fleet=fleet,
        routes=routes,
        estimates=estimates,
        mask=rng.random((n, c)) < masked,
        draws=rng.random((n, c)),
        now=now,
    )


def plain_state(m: int = 2, *, prompt: float = 100.0, expected: float = 50.0, **profile) -> State:
    """One request over m equal idle replicas, every estimate alike: for scenarios written by
    hand.
    """
    spec = FleetSpec(
        replicas=tuple(
            ReplicaSpec(name=f"r{i}", variant="v", profile=Profile(**profile)) for i in range(m)
        ),
        variants=(Variant(name="v", model="m"),),
    )
    requests, estimates = request_columns(1), estimate_columns(1, m)
    requests.prompt[:], requests.expected[:] = prompt, expected
    requests.arrived[:] = 10.0
    estimates.ttft[:], estimates.tpot[:], estimates.p_slo[:] = 0.1, 0.02, 1.0
    return State(
        requests=requests,
        fleet=fleet_columns(spec.replicas),
        routes=route_table(spec).routes,
        estimates=estimates,
        mask=np.ones((1, m), np.bool_),
        draws=np.full((1, m), 0.5),
        now=10.0,
    )
