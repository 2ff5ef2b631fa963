"""`sluice train policy --algo ppo`: a set scorer by proximal policy optimisation over many fleets.

The policy is a masked softmax over {replicas that have room, wait, refuse} whose logits are the
scores of `policies.scorers.network` over a temperature: at first those of the marginal rule, bit
for bit, and never further from them than `reach` requests. Every update meets fresh fleets
(`training.fleet_env`) of 2 to 32 replicas with wrong constants, late readings, blurred lengths and
bursts; the rule meets some of them too, with the same requests, and is what live goodput is
compared with.

    r     credit of the requests in time since the last decision: half by count, half by work
    c     requests of the first class that settled without their limits met
    gamma = exp(-dt / horizon), lambda = exp(-dt / trace): dt seconds lie between two decisions
    A     = (A_r - mu A_c) / (1 + mu), each from its own critic by generalised advantage estimation
            (Schulman et al., arXiv 1506.02438)
    mu    a PID controller (Stooke et al., arXiv 2007.03964) that holds the share of late requests
            of the first class to the rule's; it exists in training only
    loss  the clipped objective (Schulman et al., arXiv 1707.06347) less an entropy bonus; an update
            ends where the policy has moved by a KL divergence of 1.5 x `kl`

A floor on quality is no cost here: it is a hard mask, in the environment as in the core. Every few
updates the policy, without its chance, is judged as `training.train_es` judges: in the compiled
loop, on worlds of `training.worlds` that it never meets; the best is kept, the rule if none is.

    OUT/checkpoint.pt               all that a resumed run needs
    OUT/report.html, report.md      curves, multipliers, attainment, action shares, differences
    REGISTRY/entries/NAME.json      the policy with its card and the ranges it was trained on

Same arguments, same result, however often it is interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from domain.errors import ConfigError
from policies import registry
from policies.config import NetworkPolicy
from policies.factory import build_scorer
from policies.names import TRAITS, Trait
from policies.scorers.network import UNITS
from training import train_es
from training.fleet_env import FleetVectorEnv, Randomisation
from training.scenario import read
from training.set_network import NEVER, SetNetwork, logits_of
from training.set_view import Watcher
from training.train_es import DONE, NOT_BETTER, UNBOUNDED, Arena, Judged, Tell, Validation
from training.worlds import Ranges

SIZES: tuple[tuple[int, float], ...] = ((4, 0.3), (8, 0.35), (16, 0.2), (32, 0.15))
"""Largest fleet of an update's draws, with its chance: small fleets fill sooner."""
START = NetworkPolicy(kind="network", overload_target=0.0, log_candidates=0)
"""The marginal rule."""
RULE = build_scorer(START)
HOLD_ABOVE = START.hold_above


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and how much; the same job gives the same result.

    An update takes `steps` decisions in each of `fleets`; the rule meets the first `paired` of
    them. `horizon` and `trace` in s, `temperature` and `reach` in requests. `multipliers` False
    lets mu be 0, `warm_start` False draws the heads instead of starting at the rule,
    `randomised` False trains with true constants, fresh readings, good forecasts and no bursts.
    `load` as in the environment: 1 is what a fleet does at batches of 32.
    """

    updates: int = 80
    fleets: int = 32
    steps: int = 512
    paired: int = 8
    seed: int = 1
    width: int = 16
    temperature: float = 0.05
    reach: float = 0.5
    horizon: float = 20.0
    trace: float = 3.0
    epochs: int = 3
    batches: int = 4
    clip: float = 0.2
    entropy: float = 0.002
    kl: float = 0.02
    rate: float = 3e-3
    critic_rate: float = 2e-3
    multipliers: bool = True
    warm_start: bool = True
    randomised: bool = True
    load: tuple[float, float] = (0.7, 1.5)
    requests: int = 400
    every: int = 10
    ranges: Ranges = Ranges()

    def worlds(self) -> Randomisation:
        """What fleets are drawn from."""
        drawn = self.ranges
        plain = {"constants": (1.0, 1.0), "delay": (0.0, 0.0), "sigma": (0.1, 0.1)}
        plain["cv"] = (1.0, 1.0)
        same = {name: getattr(drawn, name) for name in (*plain, "urgent")}
        return Randomisation(
            requests=self.requests,
            fleet_size=(2, max(size for size, _ in SIZES)),
            load=self.load,
            max_decisions=1 << 30,
            by_work=True,
            **(same if self.randomised else same | plain),
        )


# ---- what the critics see


class Critic(nn.Module):
    """Discounted sum of what is still to come, from all replicas: a sum over them, so that it grows
    with what runs.
    """

    def __init__(self, request: int, route: int, width: int = 32) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(route + 2, width), nn.ReLU(), nn.Linear(width, width))
        self.all = nn.Sequential(nn.Linear(request + width, width), nn.ReLU(), nn.Linear(width, 1))
        last: Any = self.all[-1]
        nn.init.zeros_(last.weight)

    def forward(self, request: Tensor, routes: Tensor) -> Tensor:
        """Of (B, R) and (B, M, C), as `policies.encoding` has them; (B,)."""
        own, late = routes[:, :, 3], routes[:, :, 17]
        count = own / (1.0 - own).clamp(min=1e-3)  # sequences over 16
        x = torch.cat([routes, count.unsqueeze(-1), (count * late).unsqueeze(-1)], -1)
        pooled = (self.each(x) * routes[:, :, :1]).sum(1)
        y: Tensor = self.all(torch.cat([request, pooled], 1)).squeeze(-1)
        return y


# ---- meeting fleets


class Rollout(NamedTuple):
    """Decisions (T, F, ...) with what came of them; `valid` False where an episode had ended."""

    inputs: NDArray[np.float32]  # (T, F, m, K)
    value: NDArray[np.float32]  # (T, F, m)
    harm: NDArray[np.float32]
    worth: NDArray[np.float32]  # (T, F)
    mask: NDArray[np.bool_]  # (T, F, m + 2)
    request: NDArray[np.float32]  # (T + 1, F, R)
    routes: NDArray[np.float32]  # (T + 1, F, m, C)
    action: NDArray[np.int64]  # (T, F) m: wait, m + 1: refuse
    log_prob: NDArray[np.float32]
    reward: NDArray[np.float64]
    cost: NDArray[np.float64]
    elapsed: NDArray[np.float64]  # s to the next decision
    ended: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    settled: NDArray[np.int64]  # (F,)
    met: NDArray[np.int64]
    first: NDArray[np.int64]  # (F, 2) of the first class: met, missed

    def attainment(self, fleets: int) -> float:
        """Share of the credit earned in the first fleets."""
        return float(self.reward[:, :fleets].sum() / max(self.settled[:fleets].sum(), 1))

    def late(self, fleets: int) -> float:
        """Share of the first class that missed its limits there."""
        met, missed = self.first[:fleets].sum(0)
        return float(missed / max(met + missed, 1))


def collect(
    env: FleetVectorEnv,
    watcher: Watcher,
    network: SetNetwork,
    job: Job,
    *,
    seed: int,
    most: int,
    greedy: bool,
) -> Rollout:
    """`job.steps` decisions in every fleet of at most `most` replicas, by chance or by the largest
    logit.
    """
    torch_rng = torch.Generator().manual_seed(seed)
    f, m = env.num_envs, most
    observation, info = env.reset(seed=seed, options={"fleet_size": (2, most)})
    rows: dict[str, list[Any]] = {name: [] for name in Rollout._fields}
    settled, met = np.zeros(f, np.int64), np.zeros(f, np.int64)
    first = np.zeros((f, 2), np.int64)
    over = np.zeros(f, np.bool_)
    for _ in range(job.steps):
        view, allowed = watcher.look(), info["action_mask"].astype(np.bool_)
        room, may_queue = allowed[:, :m], allowed[:, env.hold]
        some = room.any(1)
        # where nothing has room nobody is asked: the request waits, as in the core
        wait = may_queue & (view.may_wait | ~some)
        mask = np.concatenate([room, wait[:, None], (some | ~wait)[:, None]], 1)
        seen = (view.inputs[:, :m].copy(), view.value[:, :m].copy(), view.harm[:, :m].copy(),
                view.worth.copy())  # fmt: skip
        with torch.no_grad():
            inputs, value, harm, worth = (torch.from_numpy(column) for column in seen)
            logits = logits_of(
                network, inputs, value, harm, worth, torch.from_numpy(mask),
                hold_above=HOLD_ABOVE, reach=job.reach, temperature=job.temperature,
            )  # fmt: skip
            if greedy:
                action = logits.argmax(1)
            else:
                action = torch.multinomial(logits.softmax(1), 1, generator=torch_rng).squeeze(1)
            log_prob = logits.log_softmax(1).gather(1, action.unsqueeze(1)).squeeze(1)
        for name, array in zip(("inputs", "value", "harm", "worth"), seen, strict=True):
            rows[name].append(array)
        rows["mask"].append(mask)
        rows["request"].append(observation["request"].copy())
        rows["routes"].append(observation["routes"][:, :m].copy())
        rows["action"].append(action.numpy())
        rows["log_prob"].append(log_prob.numpy())
        rows["valid"].append(~over)
        taken = action.numpy() + (action.numpy() >= m) * (env.hold - m)
        observation, reward, ended, _, info = env.step(taken)
        rows["reward"].append(0.5 * (reward + info["met"]))
        rows["cost"].append(info["first_missed"].astype(np.float64))
        rows["elapsed"].append(info["elapsed"].copy())
        rows["ended"].append(ended.copy())
        over = ended.copy()
        settled += info["met"] + info["missed"]
        met += info["met"]
        first += np.stack([info["first_met"], info["first_missed"]], 1)
    rows["request"].append(observation["request"].copy())
    rows["routes"].append(observation["routes"][:, :m].copy())
    stacked = {name: np.stack(parts) for name, parts in rows.items() if parts}
    return Rollout(**stacked, settled=settled, met=met, first=first)


def advantages(
    rollout: Rollout, earned: NDArray[np.float64], values: NDArray[np.float64], job: Job
) -> NDArray[np.float64]:
    """Generalised advantages (T, F) of what was `earned` (T, F), with values (T + 1, F); discount
    and trace by the seconds between decisions.
    """
    keep = np.where(rollout.ended, 0.0, np.exp(-rollout.elapsed / job.horizon))
    trace = np.exp(-rollout.elapsed / job.trace)
    found = np.zeros_like(earned)
    coming = np.zeros(earned.shape[1])
    for t in range(len(earned) - 1, -1, -1):
        delta = earned[t] + keep[t] * values[t + 1] - values[t]
        coming = np.where(rollout.valid[t], delta + keep[t] * trace[t] * coming, 0.0)
        found[t] = coming
    return found


# ---- the multiplier


@dataclass(slots=True)
class Multiplier:
    """mu, from how much more of the first class is late than under the rule."""

    proportional: float = 10.0
    integral: float = 2.0
    derivative: float = 5.0
    most: float = 5.0
    total: float = 0.0
    last: float = 0.0

    def update(self, excess: float) -> float:
        """The multiplier after an update that had this excess, a share of the class's requests."""
        self.total = min(max(self.total + self.integral * excess, 0.0), self.most)
        rise = max(excess - self.last, 0.0)
        self.last = excess
        mu = self.proportional * excess + self.total + self.derivative * rise
        return min(max(mu, 0.0), self.most)


# ---- training


class Row(NamedTuple):
    """One update: shares unless it says otherwise."""

    goodput: float  # of the policy that samples, in the paired fleets
    rule: float  # of the rule there
    late: float  # of the first class, likewise
    rule_late: float
    mu: float
    routed: float  # of decisions with a choice
    waited: float
    refused: float
    as_rule: float  # the rule would have done the same
    kl: float  # nats
    clipped: float
    entropy: float  # nats
    explained: float  # variance of the returns that the critic explains
    explained_cost: float
    decisions: int
    seconds: float  # CPU


@dataclass(slots=True)
class Found:
    """What a job found; `best` is the rule itself at update 0."""

    policy: NetworkPolicy
    best: Judged
    curve: list[Judged]
    rows: list[Row]
    ranges: dict[Trait, tuple[float, float]]
    seconds: float


@dataclass(slots=True)
class _State:
    """All that training changes."""

    network: SetNetwork
    critics: tuple[Critic, Critic]
    optimiser: torch.optim.Adam
    critic_optimiser: torch.optim.Adam
    multiplier: Multiplier = field(default_factory=Multiplier)
    rows: list[Row] = field(default_factory=list)
    curve: list[Judged] = field(default_factory=list)
    best: Judged | None = None
    best_layers: dict[str, Any] | None = None
    low: Tensor = field(default_factory=lambda: torch.full((len(TRAITS),), math.inf))
    high: Tensor = field(default_factory=lambda: torch.full((len(TRAITS),), -math.inf))

    def pack(self, job: Job) -> dict[str, Any]:
        return {
            "job": _plain(job),
            "network": self.network.state_dict(),
            "critics": [critic.state_dict() for critic in self.critics],
            "optimisers": [self.optimiser.state_dict(), self.critic_optimiser.state_dict()],
            "multiplier": asdict(self.multiplier),
            "rows": [row._asdict() for row in self.rows],
            "curve": [_judged(j) for j in self.curve],
            "best": None if self.best is None else _judged(self.best),
            "best_layers": self.best_layers,
            "ranges": [self.low, self.high],
        }

    def unpack(self, kept: dict[str, Any]) -> None:
        self.network.load_state_dict(kept["network"])
        for critic, state in zip(self.critics, kept["critics"], strict=True):
            critic.load_state_dict(state)
        self.optimiser.load_state_dict(kept["optimisers"][0])
        self.critic_optimiser.load_state_dict(kept["optimisers"][1])
        self.multiplier = Multiplier(**kept["multiplier"])
        self.rows = [Row(**row) for row in kept["rows"]]
        self.curve = [Judged(**j) for j in kept["curve"]]
        self.best = None if kept["best"] is None else Judged(**kept["best"])
        self.best_layers = kept["best_layers"]
        self.low, self.high = kept["ranges"]


def _plain(job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(asdict(job)))
    return fields


def _judged(judged: Judged) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(asdict(judged)))
    return fields


def fresh(job: Job, request: int, route: int) -> _State:
    """Networks as they start, by the job's seed."""
    torch.manual_seed(job.seed)
    network = SetNetwork(job.width, warm=job.warm_start)
    critics = Critic(request, route), Critic(request, route)
    return _State(
        network=network,
        critics=critics,
        optimiser=torch.optim.Adam(network.parameters(), job.rate),
        critic_optimiser=torch.optim.Adam(
            [p for critic in critics for p in critic.parameters()], job.critic_rate
        ),
    )


Judge = Callable[[int, NetworkPolicy], Judged]


def train(
    job: Job,
    folder: Path,
    judge: Judge,
    tell: Tell = lambda _done, _all, _what: None,
    minutes: float = math.inf,
) -> Found:
    """Run, or go on with, a job; checkpoint in `folder`. Stops where `minutes` of CPU, of all calls
    together, are spent.

    Raises: ConfigError for a folder that belongs to another job.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    worlds = job.worlds()
    env = FleetVectorEnv(job.fleets, worlds, copy=False)
    paired = FleetVectorEnv(job.paired, worlds, copy=False)
    watchers = Watcher(env, RULE), Watcher(paired, RULE)
    spaces: Any = env.single_observation_space
    state = fresh(job, spaces["request"].shape[0], spaces["routes"].shape[1])
    path = folder / "checkpoint.pt"
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if _comparable(kept["job"]) != _comparable(_plain(job)):
            raise ConfigError(f"{path} belongs to another job; take an empty folder")
        state.unpack(kept)
    said = ""
    while len(state.rows) < job.updates:
        if sum(row.seconds for row in state.rows) > 60.0 * minutes:
            break
        began = time.process_time()
        number = len(state.rows)
        row = update(job, state, env, paired, watchers, number)
        if (number + 1) % job.every == 0 or number + 1 == job.updates:
            judged = judge(number + 1, policy_of(job, state.network.layers()))
            state.curve.append(judged)
            if judged.gain > (0.0 if state.best is None else state.best.gain):
                state.best, state.best_layers = judged, state.network.layers()
            said = f", judged @90 x {judged.ratio['0.9']:.3f}"
        state.rows.append(row._replace(seconds=round(time.process_time() - began, 3)))
        _save(path, state.pack(job))
        tell(
            number + 1,
            job.updates,
            f"in time {100 * row.goodput:.1f} % (rule {100 * row.rule:.1f}), mu {row.mu:.2f}{said}",
        )
    best = state.best or Judged(
        generation=0, gain=0.0, ratio={"0.9": 1.0, "0.99": 1.0}, least=1.0, by_world=[]
    )
    return Found(
        policy=policy_of(job, state.best_layers),
        best=best,
        curve=state.curve,
        rows=state.rows,
        ranges=_ranges(state.low.numpy(), state.high.numpy()),
        seconds=sum(row.seconds for row in state.rows),
    )


def _comparable(plain: dict[str, Any]) -> dict[str, Any]:
    """A job may be continued with more updates."""
    return {k: v for k, v in plain.items() if k != "updates"}


def _save(path: Path, packed: dict[str, Any]) -> None:
    """Write beside and rename, so that a run that is killed leaves the last whole checkpoint."""
    part = path.with_suffix(".part")
    torch.save(packed, part)
    part.replace(path)


def _ranges(low: Any, high: Any) -> dict[Trait, tuple[float, float]]:
    """Lowest and highest value of the traits without a bound of their own."""
    found: dict[Trait, tuple[float, float]] = {}
    for name in UNBOUNDED:
        k = TRAITS.index(name)
        if low[k] <= high[k]:
            found[name] = (_short(low[k] / UNITS[k]), _short(high[k] / UNITS[k]))
    return found


def _short(x: float) -> float:
    return float(f"{x:.6g}")


def policy_of(job: Job, layers: dict[str, Any] | None) -> NetworkPolicy:
    """The policy with these layers, rounded; the rule without any."""

    def rounded(x: Any) -> Any:
        return [rounded(y) for y in x] if isinstance(x, list) else _short(x)

    short = layers and {k: v if k == "inputs" else rounded(v) for k, v in layers.items()}
    return NetworkPolicy.model_validate(START.model_dump() | {"layers": short, "reach": job.reach})


def update(
    job: Job,
    state: _State,
    env: FleetVectorEnv,
    paired: FleetVectorEnv,
    watchers: tuple[Watcher, Watcher],
    number: int,
) -> Row:
    """One update: meet fleets, move the multiplier, the critics and the policy."""
    rng = np.random.default_rng([job.seed, number])
    sizes, chances = zip(*SIZES, strict=True)
    most, seed = int(rng.choice(sizes, p=chances)), int(rng.integers(1 << 30))
    rule = SetNetwork(1)
    kept = {"seed": seed, "most": most}
    theirs = collect(paired, watchers[1], rule, job, **kept, greedy=True)
    mine = collect(env, watchers[0], state.network, job, **kept, greedy=False)
    goodput, late = mine.attainment(job.paired), mine.late(job.paired)
    excess = late - theirs.late(job.paired)
    mu = state.multiplier.update(excess) if job.multipliers else 0.0

    batch = {name: torch.from_numpy(getattr(mine, name)) for name in Rollout._fields}
    with torch.no_grad():
        values = [
            critic(batch["request"].flatten(0, 1), batch["routes"].flatten(0, 1))
            .view(job.steps + 1, env.num_envs).double().numpy()
            for critic in state.critics
        ]  # fmt: skip
    both = [
        advantages(mine, earned, v, job)
        for earned, v in zip((mine.reward, mine.cost), values, strict=True)
    ]
    returns = [a + v[:-1] for a, v in zip(both, values, strict=True)]
    combined = (both[0] - mu * both[1]) / (1.0 + mu)

    chosen = mine.valid & (mine.mask.sum(2) > 1)
    there = batch["mask"][..., :-2][torch.from_numpy(chosen)]
    seen = batch["inputs"][torch.from_numpy(chosen)][there][:, : len(TRAITS)]
    if len(seen):
        state.low = torch.minimum(state.low, seen.amin(0))
        state.high = torch.maximum(state.high, seen.amax(0))
    moved = _improve(job, state, batch, chosen, combined, rng)
    _fit(job, state, batch, mine.valid, returns, rng)
    taken = mine.action[chosen]
    count = max(len(taken), 1)
    return Row(
        goodput=goodput,
        rule=theirs.attainment(job.paired),
        late=late,
        rule_late=theirs.late(job.paired),
        mu=mu,
        routed=float((taken < most).sum() / count),
        waited=float((taken == most).sum() / count),
        refused=float((taken > most).sum() / count),
        as_rule=_agreement(job, rule, batch, chosen),
        explained=_explained(returns[0][mine.valid], values[0][:-1][mine.valid]),
        explained_cost=_explained(returns[1][mine.valid], values[1][:-1][mine.valid]),
        decisions=int(mine.valid.sum()),
        seconds=0.0,
        **moved,
    )


def _explained(truth: NDArray[np.float64], guess: NDArray[np.float64]) -> float:
    return float(1.0 - (truth - guess).var() / max(truth.var(), 1e-12))


def _logits(job: Job, network: SetNetwork, part: dict[str, Tensor]) -> Tensor:
    return logits_of(
        network, part["inputs"], part["value"], part["harm"], part["worth"], part["mask"],
        hold_above=HOLD_ABOVE, reach=job.reach, temperature=job.temperature,
    )  # fmt: skip


def _agreement(
    job: Job, rule: SetNetwork, batch: dict[str, Tensor], chosen: NDArray[np.bool_]
) -> float:
    """Share of the decisions in which the rule would have done what was done."""
    rows = torch.from_numpy(chosen)
    part = {name: batch[name][rows] for name in ("inputs", "value", "harm", "worth", "mask")}
    with torch.no_grad():
        same = _logits(job, rule, part).argmax(1) == batch["action"][rows]
    return float(same.double().mean())


def _improve(
    job: Job,
    state: _State,
    batch: dict[str, Tensor],
    chosen: NDArray[np.bool_],
    advantage: NDArray[np.float64],
    rng: np.random.Generator,
) -> dict[str, float]:
    """Epochs of the clipped objective over the decisions that had a choice; KL, share clipped and
    entropy of the last batch.
    """
    places = np.flatnonzero(chosen.ravel())
    flat = {
        name: batch[name].flatten(0, 1)
        for name in ("inputs", "value", "harm", "worth", "mask", "action", "log_prob")
    }
    scaled = advantage.ravel()[places]
    scaled = (scaled - scaled.mean()) / max(float(scaled.std()), 1e-8)
    gain = torch.zeros(chosen.size)
    gain[places] = torch.from_numpy(scaled).float()
    told = {"kl": 0.0, "clipped": 0.0, "entropy": 0.0}
    for _ in range(job.epochs):
        for part in np.array_split(rng.permutation(places), job.batches):
            rows = torch.from_numpy(part)
            mine = {name: column[rows] for name, column in flat.items()}
            logs = _logits(job, state.network, mine).log_softmax(1)
            log_prob = logs.gather(1, mine["action"].unsqueeze(1)).squeeze(1)
            change = log_prob - mine["log_prob"]
            ratio = change.exp()
            with torch.no_grad():
                kl = float((ratio - 1.0 - change).mean())
            told["kl"] = kl
            if kl > 1.5 * job.kl:
                return told
            clipped = ratio.clamp(1.0 - job.clip, 1.0 + job.clip)
            better = torch.minimum(ratio * gain[rows], clipped * gain[rows]).mean()
            entropy = -(logs.exp() * logs.clamp(min=NEVER / 2)).sum(1).mean()
            state.optimiser.zero_grad()
            (-better - job.entropy * entropy).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(state.network.parameters(), 0.5)
            state.optimiser.step()
            told["clipped"] = float(((ratio - 1.0).abs() > job.clip).double().mean())
            told["entropy"] = float(entropy.detach())
    return told


def _fit(
    job: Job,
    state: _State,
    batch: dict[str, Tensor],
    valid: NDArray[np.bool_],
    returns: Sequence[NDArray[np.float64]],
    rng: np.random.Generator,
) -> None:
    """Epochs of least squares of the critics over all decisions."""
    request, routes = batch["request"][:-1].flatten(0, 1), batch["routes"][:-1].flatten(0, 1)
    targets = [torch.from_numpy(r.ravel()).float() for r in returns]
    places = np.flatnonzero(valid.ravel())
    for _ in range(job.epochs):
        for part in np.array_split(rng.permutation(places), 2 * job.batches):
            rows = torch.from_numpy(part)
            loss = sum(
                ((critic(request[rows], routes[rows]) - goal[rows]) ** 2).mean()
                for critic, goal in zip(state.critics, targets, strict=True)
            )
            state.critic_optimiser.zero_grad()
            loss.backward()
            state.critic_optimiser.step()


# ---- the job


def main(argv: Sequence[str] | None = None, tell: Tell = lambda _done, _all, _what: None) -> int:
    """Run the job: 0 the policy is in the registry, 1 nothing better than the rule was found.

    Raises: ConfigError.
    """
    parser = argparse.ArgumentParser(prog="sluice train policy --algo ppo", description=__doc__)
    parser.add_argument(
        "--scenario", type=Path, nargs="+", required=True, help="templates of what judges it"
    )
    parser.add_argument("--algo", choices=("ppo",), default="ppo")
    parser.add_argument("--name", default="network", help="of the entry")
    parser.add_argument("--registry", type=Path, default=Path(".sluice/policies"))
    parser.add_argument("--shadow", action="store_true", help="and let it score in shadow there")
    parser.add_argument(
        "--out", type=Path, default=Path(".sluice/train-ppo"), help="checkpoint, report"
    )
    parser.add_argument("--updates", type=int, default=Job().updates)
    parser.add_argument("--fleets", type=int, default=Job().fleets, help="of an update")
    parser.add_argument("--steps", type=int, default=Job().steps, help="decisions of a fleet")
    parser.add_argument("--width", type=int, default=Job().width, help="of the network")
    parser.add_argument("--every", type=int, default=Job().every, help="updates between judgements")
    parser.add_argument("--multipliers", choices=("on", "off"), default="on")
    parser.add_argument("--warm-start", choices=("on", "off"), default="on")
    parser.add_argument("--randomisation", choices=("on", "off"), default="on")
    parser.add_argument("--requests", type=int, default=1500, help="of a case that judges")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most, of all calls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--profiles", type=Path, help="folder of profiles, instead of the shipped")
    parser.add_argument("--nice", type=int, default=0, help="give way to others by so much")
    args = parser.parse_args(argv)
    if min(args.updates, args.fleets, args.steps, args.width, args.every, args.requests) < 1:
        raise ConfigError(
            "--updates, --fleets, --steps, --width, --every, --requests: 1 or more each"
        )
    if args.nice:
        os.nice(args.nice)
    job = Job(
        updates=args.updates,
        fleets=args.fleets,
        paired=min(Job().paired, args.fleets),
        steps=args.steps,
        width=args.width,
        every=args.every,
        seed=args.seed,
        multipliers=args.multipliers == "on",
        warm_start=args.warm_start == "on",
        randomised=args.randomisation == "on",
        ranges=Ranges(requests=args.requests, live_requests=min(900, args.requests)),
    )
    templates = [read(path) for path in args.scenario]
    judging = train_es.Job(
        scenarios=tuple(t.name for t in templates), seed=job.seed, ranges=job.ranges
    )
    arena = Arena(judging, templates, args.data, args.profiles)
    validation: list[Validation] = []

    def judge(number: int, policy: NetworkPolicy) -> Judged:
        if not validation:
            validation.append(Validation(arena))
        return validation[0].judge(number, policy)

    try:
        found = train(job, args.out, judge, tell, args.minutes)
    except FileNotFoundError as exc:
        raise ConfigError(str(exc)) from exc
    command = ["sluice train policy --scenario", *map(str, args.scenario), "--algo ppo"]
    named = (
        "updates", "fleets", "steps", "width", "every", "multipliers", "warm_start",
        "randomisation", "requests", "seed",
    )  # fmt: skip
    command += [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in named]
    policy = found.policy.model_copy(update={"envelope": found.ranges})
    entry = registry.entry_of(args.name, policy, _card(job, judging, found, " ".join(command)))
    from training.ppo_report import write

    write(args.out, arena, found, entry)
    summary = {"report": str(args.out / "report.html")}
    if found.best.generation == 0:
        print(json.dumps(summary | {"entry": None, "why": "no better than the rule"}, indent=1))
        return NOT_BETTER
    registry.probe(entry.policy)
    path = registry.write_entry(args.registry, entry)
    if args.shadow:
        registry.change_state(
            args.registry, lambda state: registry.shadowed(state, args.name, time.time())
        )
    summary |= {"entry": str(path), "hash": entry.hash[:12]}
    print(json.dumps(summary | entry.card["validation"], indent=1))
    return DONE


def _card(job: Job, judging: train_es.Job, found: Found, command: str) -> dict[str, Any]:
    """What is known of a trained policy."""
    best = found.best
    return {
        "job": "training.train_ppo",
        "command": command,
        "starts from": "marginal" if job.warm_start else "heads drawn at random",
        "trained": _plain(job),
        "updates": len(found.rows),
        "kept": best.generation,
        "decisions": sum(row.decisions for row in found.rows),
        "cpu minutes": round(found.seconds / 60.0, 1),
        "validation": {
            "scenarios": list(judging.scenarios),
            "worlds": judging.validate,
            "goodput@90 over the rule": _known(best.ratio["0.9"]),
            "goodput@99 over the rule": _known(best.ratio["0.99"]),
            "least @90": _known(best.least),
        },
        "limits": "simulated fleets only; one pool of replicas, no prefix blocks while training",
    }


def _known(x: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(x) else x


if __name__ == "__main__":
    sys.exit(main())
