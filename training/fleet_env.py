"""Gymnasium environments: route requests over a modelled fleet, one decision at a time.

`FleetEnv` is one fleet, `FleetVectorEnv` many, stepped in one compiled call (`training.env_loop`);
fleet k of the vector, seeded with s, lives exactly as a `FleetEnv` seeded with s + k.

Action: an index below M (the replica), M (hold) or M + 1 (refuse); M is the largest fleet size.
`info["action_mask"]` (M + 2,) int8 says what is allowed: replicas that may serve the request and
whose window has room, hold while it may still be in time and the queue is not full, refuse always.
An action outside the mask counts as hold where that is allowed, else as refuse.

Decisions: one for every arrival, at its gateway; and when something at the fleet may have opened a
window (a first token, an end, a reading), for at most `env_loop.OFFERS` of the requests that
wait there and now have room, by latest useful start. A held request is refused by itself when
that time has come.

Observation: `request` (R,) and `routes` (M, C) as `policies.encoding` writes them, float32 in
[0, 1]; rows of replicas that are not there are zero. A decision sees only what its gateway knows:
its own streams, and readings of every replica, `delay` seconds old at least. The gateway believes
in the nominal profile, forecasts of lengths are the truth blurred, and nothing is learned on line.

Reward: the sum of the weights of the requests that settled since the last decision with all their
limits met; with `by_work` of their work, prompt + 5 x output, over its mean in the episode. A
request settles with its last token, or when it is refused (nothing); so credit comes at the end
and sums to the weighted number of requests in time. Time between decisions varies
(semi-MDP): `info["elapsed"]` is the seconds that the reward was earned in, to discount by;
`info["now"]` the time since the start (at reset: the first arrival); `info["met"]`, `["missed"]`
and `["refused"]` count what settled (refused by an action: part of the missed), `["first_met"]` and
`["first_missed"]` those of the first class;
`info["fleet_size"]` and `["gateways"]` how many there are.

Terminated: every request of the episode has settled. Truncated: `max_decisions` were taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil
from statistics import NormalDist
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from backends.sim import replica as sim
from backends.sim.profiles import read_profiles, shipped
from domain.columns import (
    FleetColumns,
    Floats,
    Ints,
    Routes,
    estimate_columns,
    fleet_columns,
    request_columns,
)
from domain.fleet import Profile, ReplicaSpec
from domain.length import QUANTILE_GRID
from policies import encoding
from policies.scorers.marginal import OUTPUT_WEIGHT
from predictors.roofline import OnlineScales
from training import env_loop
from training.env_loop import REQUEST, STATE, Fleets, Results, Scratch

Range = tuple[float, float]
Observation = dict[str, NDArray[np.float32]]

TIMES = (
    "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention", "experts",
)  # fmt: skip
WORK_BATCH = 32
"""Sequences beside which a replica's capacity is reckoned."""
QUALITY = {"bf16": 0.9, "fp8": 0.895, "int4": 0.86}
"""Of an answer, by the precision of the shipped profiles (`configs/scenarios/heterogeneous.yaml`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A sort of replica that fleets are drawn from, and the chance that its answer is good."""

    profile: Profile
    quality: float = 0.9


def shipped_kinds() -> tuple[Kind, ...]:
    """The four kinds of the heterogeneous scenario, at most 96 sequences each."""
    found = read_profiles(shipped() / "estimated.yaml")
    return tuple(
        Kind(profile=replace(p, max_seqs=96), quality=QUALITY[p.key.precision])
        for p in found.values()
        if p.key.precision in QUALITY
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Randomisation:
    """What is drawn anew at every reset; pairs are the ends of a uniform draw, `constants` and
    `rate` of a log-uniform one.

    `constants`: factor on each time of each replica's profile, of which the gateways know nothing.
    `delay` (s) and `every` (s): how old readings are, and how far apart. `sigma`: spread of the log
    of (forecast / true length). `cv`: coefficient of variation of the (gamma) times between
    arrivals. `load`: arrivals over what the fleet does at batches of 32. `output` and `prompt`:
    median tokens, log-normal with spread `spread` under `most_prompt` and `most_output`. `urgent`:
    share with tight limits (TTFT 0.3 s + 0.2 ms a token, TPOT 30 ms), the others have 1 s + 0.6 ms
    and 100 ms, a share `batch` of these an E2E limit of 20 s alone. `floor`: share that asks for
    a quality of 0.88.
    """

    kinds: tuple[Kind, ...] = field(default_factory=shipped_kinds)
    requests: int = 256
    fleet_size: tuple[int, int] = (2, 32)
    gateways: tuple[int, int] = (1, 2)
    constants: Range = (0.7, 1.4)
    delay: Range = (0.0, 1.0)
    every: float = 0.5
    sigma: Range = (0.1, 1.0)
    cv: Range = (1.0, 4.0)
    load: Range = (0.5, 1.3)
    prompt: Range = (200.0, 2000.0)
    output: Range = (40.0, 300.0)
    spread: float = 0.9
    most_prompt: int = 8000
    most_output: int = 1500
    urgent: Range = (0.2, 0.8)
    batch: float = 0.2
    floor: Range = (0.0, 0.3)
    window: float = 0.05  # s of prefill backlog (CORE section 3.9)
    uncertainty: float = 0.35
    max_decisions: int = 2048
    by_work: bool = False

    def __post_init__(self) -> None:
        if not self.kinds or self.requests < 1 or self.max_decisions < 1:
            raise ValueError("an episode needs a kind of replica, a request and a decision")
        low, high = self.fleet_size
        if not 1 <= low <= high or not 1 <= self.gateways[0] <= self.gateways[1] <= 32:
            raise ValueError("fleets have one replica or more, and 1 to 32 gateways")
        if self.delay[0] < 0 or self.every <= 0 or self.cv[0] <= 0 or self.constants[0] <= 0:
            raise ValueError("delay must not be negative; every, cv and constants above 0")
        most = self.most_prompt + self.most_output + sim.PAGE
        if any(most > min(k.profile.max_context, k.profile.kv_capacity) for k in self.kinds):
            raise ValueError(f"every kind must hold a request of {most} tokens")

    def changed(self, options: Mapping[str, Any] | None) -> Randomisation:
        """With these fields replaced. Raises: ValueError for one that is unknown."""
        unknown = set(options or ()) - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"unknown options {sorted(unknown)}")
        return replace(self, **options) if options else self


class _Stable:
    """The fleets' arrays, and what writes an episode into one of them."""

    def __init__(self, count: int, drawn: Randomisation) -> None:
        self._drawn = drawn
        m, g, n = drawn.fleet_size[1], drawn.gateways[1], drawn.requests
        self._kinds: tuple[Kind, ...] = ()
        self._known: tuple[Floats, Ints, Floats] = (np.zeros(0), np.zeros(0, np.int64), np.zeros(0))
        self._streams = max(k.profile.max_seqs for k in drawn.kinds)
        spec = ReplicaSpec(name="none", variant="none", profile=drawn.kinds[0].profile)
        ring = m * (ceil(drawn.delay[1] / drawn.every) + 2)
        fleet = fleet_columns([spec] * m, self._streams)

        def many(row: Any, *axes: int) -> Any:
            kind = np.asarray(row)
            return np.zeros((count, *axes, *kind.shape), kind.dtype)

        physics = sim.physics([spec] * m, n)
        self.fleets = Fleets(
            state=np.zeros((count, 1), STATE),
            requests=np.zeros((count, n), REQUEST),
            length_q=np.zeros((count, n, len(QUANTILE_GRID))),
            quality=np.zeros((count, m)),
            columns=FleetColumns(*(many(column, g) for column in fleet)),
            physics=physics._replace(
                **{k: many(v) for k, v in physics._asdict().items() if isinstance(v, np.ndarray)}
            ),
            measured_at=np.zeros((count, g, m)),
            pulled=np.zeros((count, g)),
            queue=np.zeros((count, g, env_loop.QUEUE), np.int64),
            queued=np.zeros((count, g), np.int64),
            dirty=np.zeros((count, m), np.int64),
            readings=np.zeros((count, ring, 4)),
            mask=np.zeros((count, m + 2), np.int8),
        )
        self._routes = Routes(
            decode=np.arange(m), prefill=np.arange(m), variant=np.zeros(m, np.int64),
            price=np.zeros(m),
        )  # fmt: skip
        self.scratch = Scratch(
            requests=request_columns(1),
            estimates=estimate_columns(1, m),
            allowed=np.zeros((1, m), np.bool_),
            room=np.zeros((1, m), np.bool_),
            claims=np.full(m, env_loop.NONE, np.int64),
            scales=OnlineScales(np.full(m, drawn.uncertainty)).rows,
            routes=self._routes,
            kinds=np.zeros(2 * self._streams, np.int64),
            jobs=np.zeros(2 * self._streams, np.int64),
        )

        def counts() -> Any:
            return np.zeros(count, np.int64)

        self.results = Results(
            request=np.zeros((count, encoding.R), np.float32),
            routes=np.zeros((count, m, encoding.C), np.float32),
            mask=np.zeros((count, m + 2), np.int8),
            reward=np.zeros(count),
            elapsed=np.zeros(count),
            now=np.zeros(count),
            met=counts(),
            missed=counts(),
            refused=counts(),
            first_met=counts(),
            first_missed=counts(),
            terminated=np.zeros(count, np.bool_),
            truncated=np.zeros(count, np.bool_),
        )

    def step(self, actions: NDArray[np.int64]) -> None:
        """Results of these actions in every fleet; a fleet that was just reset takes none."""
        env_loop.step_all(self.fleets, self.scratch, actions, self.results)

    def reset(self, f: int, rng: np.random.Generator, drawn: Randomisation) -> None:
        """Draw an episode into fleet f; `step` then runs it to its first decision.

        Raises: ValueError where it would be larger than what was made room for.
        """
        most = self._drawn
        if (
            drawn.fleet_size[1] > most.fleet_size[1]
            or drawn.gateways[1] > most.gateways[1]
            or drawn.requests > most.requests
            or drawn.delay[1] / drawn.every > most.delay[1] / most.every
            or max(k.profile.max_seqs for k in drawn.kinds) > self._streams
            or drawn.uncertainty != most.uncertainty
        ):
            raise ValueError("an episode may not be larger than the environment was made for")
        m = int(rng.integers(drawn.fleet_size[0], drawn.fleet_size[1], endpoint=True))
        g = int(rng.integers(drawn.gateways[0], drawn.gateways[1], endpoint=True))
        kinds = rng.integers(0, len(drawn.kinds), m)
        self._fleet(f, kinds, _log_uniform(rng, drawn.constants, (len(TIMES), m)), drawn)
        x = self.fleets
        n = drawn.requests
        self._requests(f, rng, drawn, kinds, g)
        x.state[f, 0] = np.zeros((), STATE)
        state = x.state[f, 0]
        state["delay"], state["every"] = rng.uniform(*drawn.delay), drawn.every
        state["replicas"], state["gateways"], state["requests"] = m, g, n
        state["asking"], state["limit"] = env_loop.NONE, drawn.max_decisions
        x.pulled[f] = x.measured_at[f] = -np.inf
        x.queued[f] = x.dirty[f] = 0

    def _fleet(
        self, f: int, kinds: NDArray[np.int64], factors: Floats, drawn: Randomisation
    ) -> None:
        """Idle replicas: believed profiles in the columns, true ones in the physics."""
        m, x = len(kinds), self.fleets
        table, idle, quality = self._rows_of(drawn.kinds)
        columns = x.columns
        for name in _LOADS:
            getattr(columns, name)[f] = 0
        columns.age[f] = np.inf
        columns.history_at[f] = -np.inf
        columns.usable[f] = False
        columns.usable[f, :, :m] = True
        columns.window[f] = drawn.window
        for name, row in zip(_PROFILE, table[:, kinds], strict=True):
            getattr(columns, name)[f, :, :m] = row
        x.quality[f] = 0.0
        x.quality[f, :m] = quality[kinds]
        true = idle[kinds]
        true.view(np.float64)[:, _TIMES] *= factors.T
        x.physics.replica.view(np.int64).reshape(len(x.quality), -1, _WORDS)[f, :m] = true
        x.physics.phase[f] = 0
        x.physics.n_moving[f] = 0

    def _rows_of(self, kinds: tuple[Kind, ...]) -> tuple[Floats, Ints, Floats]:
        """(profile columns x kinds), (kinds, words) idle replicas and (kinds,) their quality; made
        once.
        """
        if kinds is not self._kinds:
            specs = [ReplicaSpec(name="", variant="", profile=k.profile) for k in kinds]
            table = np.array([[float(getattr(k.profile, n)) for k in kinds] for n in _PROFILE])
            quality = np.array([k.quality for k in kinds])
            idle = sim.physics(specs, 0).replica.view(np.int64).reshape(-1, _WORDS)
            self._kinds, self._known = kinds, (table, idle, quality)
        return self._known

    def _requests(
        self,
        f: int,
        rng: np.random.Generator,
        drawn: Randomisation,
        kinds: NDArray[np.int64],
        gateways: int,
    ) -> None:
        """The episode's requests, in order of arrival."""
        x, n = self.fleets, drawn.requests
        rows = x.requests[f, :n]
        prompt = _lengths(rng, _log_uniform(rng, drawn.prompt), drawn.spread, drawn.most_prompt, n)
        output = _lengths(rng, _log_uniform(rng, drawn.output), drawn.spread, drawn.most_output, n)
        means = float(prompt.sum()) / n, float(output.sum()) / n
        speeds = np.array([1.0 / _work(k.profile, *means) for k in drawn.kinds])
        rate = rng.uniform(*drawn.load) * float(speeds[kinds].sum())
        shape = rng.uniform(*drawn.cv) ** -2
        rows["arrival"] = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate), n))
        sigma = rng.uniform(*drawn.sigma)
        median = output * np.exp(sigma * rng.standard_normal(n))
        length_q = x.length_q[f, :n]
        np.multiply(median[:, None], np.exp(sigma * _NORMAL), out=length_q)
        _clip(length_q, drawn.most_output)
        rows["expected"] = np.ceil(np.add.reduce(length_q, axis=1) / len(_NORMAL))
        rows["prompt"] = rows["tokens"] = prompt
        rows["output"] = output
        urgent = rng.random(n) < rng.uniform(*drawn.urgent)
        batch = ~urgent & (rng.random(n) < drawn.batch)
        rows["ttft"] = np.where(urgent, 0.3 + 2e-4 * prompt, 1.0 + 6e-4 * prompt)
        rows["tpot"] = np.where(urgent, 0.03, 0.1)
        rows["ttft"][batch] = rows["tpot"][batch] = np.inf
        rows["e2e"] = np.where(batch, 20.0, np.inf)
        rows["rank"] = np.where(urgent, 0, np.where(batch, 2, 1))
        rows["quality"] = np.where(rng.random(n) < rng.uniform(*drawn.floor), 0.88, 0.0)
        rows["weight"] = rows["credit"] = 1.0
        if drawn.by_work:
            work = prompt + OUTPUT_WEIGHT * output
            rows["credit"] = work / work.mean()
        rows["gateway"] = rng.integers(0, gateways, n)
        rows["tie"] = rng.integers(0, 1 << 31, n)
        rows["replica"] = env_loop.NONE
        rows["waits"] = False
        rows["sent"] = rows["first"] = np.nan
        there = [drawn.kinds[k].profile for k in set(kinds.tolist())]
        least = min(p.per_token for p in there) * prompt
        pace = min(p.overhead + p.weights for p in there)
        useful = np.minimum(rows["ttft"] - least, rows["e2e"] - least - pace * rows["expected"])
        rows["until"] = rows["arrival"] + np.maximum(useful, 0.0)


_PROFILE = (
    *TIMES, "expert_tokens", "chunk", "max_seqs", "kv_capacity", "max_context", "price",
    "uncertainty",
)  # fmt: skip
"""Columns that hold a profile."""
_LOADS = (
    "running", "context", "backlog_tokens", "kv_used", "dispatched", "foreign_running",
    "foreign_context", "foreign_backlog", "n_streams", "history_next",
)  # fmt: skip
"""Columns that are zero in an idle fleet."""
_WORDS = sim.REPLICA.itemsize // 8
_TIMES = [(sim.REPLICA.names or ()).index(name) for name in TIMES]
"""A replica's record is as many words of 8 bytes; these are its times. Plain words are copied much
faster than records.
"""
_NORMAL = np.array([NormalDist().inv_cdf(float(q)) for q in QUANTILE_GRID])


def _log_uniform(rng: np.random.Generator, ends: Range, size: Any = None) -> Any:
    return np.exp(rng.uniform(np.log(ends[0]), np.log(ends[1]), size))


def _lengths(
    rng: np.random.Generator, median: float, spread: float, most: int, n: int
) -> NDArray[np.int64]:
    return _clip(np.rint(rng.lognormal(np.log(median), spread, n)), most).astype(np.int64)


def _clip(x: Floats, most: int) -> Floats:
    """Between 1 and `most`, in place; what `np.clip` does, in half of its time on short rows."""
    np.maximum(x, 1.0, out=x)
    return np.minimum(x, most, out=x)


def _work(profile: Profile, prompt: float, output: float) -> float:
    """Seconds of a replica that a request takes, beside `WORK_BATCH` others."""
    batch = min(WORK_BATCH, profile.max_seqs)
    context = batch * (prompt + output / 2.0)
    step = profile.overhead + profile.per_sequence * batch
    step += profile.experts * batch / (batch + profile.expert_tokens)
    step += max(profile.weights + profile.per_context * context, profile.per_token * batch)
    return prompt * profile.per_token + output * step / batch


def _observation_space(m: int) -> Any:
    return spaces.Dict(
        {
            "request": spaces.Box(0.0, 1.0, (encoding.R,), np.float32),
            "routes": spaces.Box(0.0, 1.0, (m, encoding.C), np.float32),
        }
    )


class FleetEnv(gymnasium.Env[Observation, np.int64]):
    """One fleet; the module says what actions, observations, rewards and ends mean.

    `reset(options=...)` replaces fields of the randomisation for that episode; it may not become
    larger than the environment was made for.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own type

    def __init__(self, randomisation: Randomisation | None = None) -> None:
        self._drawn = randomisation if randomisation is not None else Randomisation()
        self._stable = _Stable(1, self._drawn)
        most = self._drawn.fleet_size[1]
        self.hold, self.refuse = most, most + 1
        self.action_space = spaces.Discrete(most + 2)
        self.observation_space = _observation_space(most)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new episode at its first decision."""
        super().reset(seed=seed)
        self._stable.reset(0, self.np_random, self._drawn.changed(options))
        self._stable.step(np.zeros(1, np.int64))
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Decide on the request, and go on to the next decision."""
        self._stable.step(np.array([action], np.int64))
        got = self._stable.results
        ends = bool(got.terminated[0]), bool(got.truncated[0])
        return self._observation(), float(got.reward[0]), *ends, self._info()

    def _observation(self) -> Observation:
        got = self._stable.results
        return {"request": got.request[0].copy(), "routes": got.routes[0].copy()}

    def _info(self) -> dict[str, Any]:
        got, state = self._stable.results, self._stable.fleets.state[0, 0]
        return {
            "action_mask": got.mask[0].copy(),
            "elapsed": float(got.elapsed[0]),
            "now": float(got.now[0]),
            "met": int(got.met[0]),
            "missed": int(got.missed[0]),
            "refused": int(got.refused[0]),
            "first_met": int(got.first_met[0]),
            "first_missed": int(got.first_missed[0]),
            "fleet_size": int(state["replicas"]),
            "gateways": int(state["gateways"]),
        }


class FleetVectorEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """Many fleets in one compiled call; each resets at the step after its end (`NEXT_STEP`): that
    step takes no action there and gives no reward. Infos are arrays, (num_envs, ...).

    `copy`: results are the caller's to keep; else the next step overwrites them.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - gymnasium's own type
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self, num_envs: int, randomisation: Randomisation | None = None, *, copy: bool = True
    ) -> None:
        self._drawn = randomisation if randomisation is not None else Randomisation()
        self._stable = _Stable(num_envs, self._drawn)
        self._copy = copy
        self._over = np.zeros(num_envs, np.bool_)
        self._now = self._drawn
        self._rngs = [np.random.default_rng(k) for k in range(num_envs)]
        self.num_envs = num_envs
        most = self._drawn.fleet_size[1]
        self.hold, self.refuse = most, most + 1
        self.single_action_space = spaces.Discrete(most + 2)
        self.single_observation_space = _observation_space(most)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    @property
    def columns(self) -> tuple[Fleets, Scratch]:
        """What compiled observers read (`training.set_view`); the scratch may be written."""
        return self._stable.fleets, self._stable.scratch

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new episode for every fleet; fleet k is seeded with `seed` + k."""
        super().reset(seed=seed)
        first = int(self.np_random.integers(1 << 31)) if seed is None else seed
        self._now = self._drawn.changed(options)
        for k in range(self.num_envs):
            self._rngs[k] = seeding.np_random(first + k)[0]
            self._stable.reset(k, self._rngs[k], self._now)
        self._over[:] = False
        self._stable.step(np.zeros(self.num_envs, np.int64))
        return self._given()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """One decision in every fleet; fleets that ended are reset instead."""
        for k in np.flatnonzero(self._over).tolist():
            self._stable.reset(k, self._rngs[k], self._now)
        self._stable.step(np.ascontiguousarray(actions, np.int64))
        got = self._stable.results
        self._over = got.terminated | got.truncated
        observation, info = self._given()
        reward, terminated, truncated = got.reward, got.terminated, got.truncated
        if self._copy:
            reward, terminated, truncated = reward.copy(), terminated.copy(), truncated.copy()
        return observation, reward, terminated, truncated, info

    def _given(self) -> tuple[Observation, dict[str, Any]]:
        got, state = self._stable.results, self._stable.fleets.state[:, 0]
        shown: dict[str, Any] = {
            "action_mask": got.mask,
            "elapsed": got.elapsed,
            "now": got.now,
            "met": got.met,
            "missed": got.missed,
            "refused": got.refused,
            "first_met": got.first_met,
            "first_missed": got.first_missed,
            "fleet_size": state["replicas"],
            "gateways": state["gateways"],
        }
        seen = {"request": got.request, "routes": got.routes}
        if self._copy:
            seen = {k: v.copy() for k, v in seen.items()}
            shown = {k: v.copy() for k, v in shown.items()}
        return seen, shown
