"""The closed forms against an engine that walks through every iteration, and against theory."""

import numpy as np
import pytest
from numba import njit

from backends.sim import replica as sim
from domain.fleet import Profile, ReplicaSpec
from tests.backends.sim.naive import Fleet, Job


def spec(name="r", **fields):
    return ReplicaSpec(name=name, variant="v", profile=Profile(**fields))


def drive(ph, script, n):
    """The compiled replicas under the script of `naive.Fleet.run`; (first, finish, lost) times."""
    first, finish, lost = (np.full(n, np.nan) for _ in range(3))
    kinds, jobs = np.zeros(4096, np.int64), np.zeros(4096, np.int64)
    script = list(script)
    while True:
        at, r = sim.next_event(ph)
        if script and script[0][0] <= at:
            now, kind, j, r = script.pop(0)
            if kind == "enter":
                if not sim.enter(ph, r, j, now):
                    lost[j] = now
                elif sim.idle(ph, r):
                    sim.plan(ph, r, now)
            elif kind == "abort":
                sim.abort(ph, j, now)
            elif kind == "hand":
                sim.hand_over(ph, j, r, now)
            elif kind == "kill":
                for k in range(sim.kill(ph, r, now, jobs)):
                    lost[jobs[k]] = now
            else:
                sim.revive(ph, r)
            continue
        if at == np.inf:
            return first, finish, lost
        if r == sim.NONE:
            if sim.deliver(ph, kinds, jobs):
                if kinds[0] == sim.LOST:
                    lost[jobs[0]] = at
                elif sim.idle(ph, ph.job["where"][jobs[0]]):
                    sim.plan(ph, ph.job["where"][jobs[0]], at)
            continue
        for k in range(sim.fire(ph, r, kinds, jobs)):
            (first if kinds[k] == sim.FIRST_TOKEN else finish)[jobs[k]] = at
        sim.plan(ph, r, at)
        check(ph, r)


def check(ph, r):
    """No page is lost and the counters agree with the jobs."""
    replica, job = ph.replica[r], ph.job
    mine = np.flatnonzero(job["where"] == r)
    running = [j for j in mine if job["state"][j] in (sim.PREFILLING, sim.DECODING)]
    own = sum(int(sim.pages_for(ph, sim.private_tokens(ph, int(j)))) for j in running)
    resident = int((ph.holders[r] >= 0).sum())
    assert replica["free"] >= 0
    assert replica["free"] + own + resident * ph.block_pages == replica["pages"]
    assert (ph.holders[r] == 0).sum() == replica["evictable"]
    decoding = [j for j in running if job["state"][j] == sim.DECODING]
    assert len(decoding) == replica["n_decode"] == ph.phase[r].sum()
    given = [job["generated"][j] + replica["steps"] - job["joined"][j] for j in decoding]
    assert replica["context"] == sum(job["prompt"][decoding]) + sum(given)


def scenario(seed, *, prefixes, tight, aborts, deaths, split, uneven, speculation, adapters, hands):
    """A random fleet and script, for both engines."""
    rng = np.random.default_rng(seed)
    m, n = int(rng.integers(1, 4)) + split, int(rng.integers(20, 120))
    block = int(rng.choice([16, 64, 24])) if prefixes else 16
    profiles = [
        Profile(
            overhead=rng.uniform(0, 0.004),
            weights=rng.uniform(0.001, 0.02),
            per_sequence=rng.uniform(0, 1e-4),
            per_context=rng.choice([1e-7, 5e-6]),
            per_token=rng.choice([2e-5, 4e-4]),
            per_attention=rng.choice([0.0, 1e-7]),
            experts=rng.choice([0.0, 0.02]),
            expert_tokens=rng.choice([0.5, 40.0]),
            chunk=int(rng.choice([64, 256, 512])),
            max_seqs=int(rng.choice([2, 5, 24])),
            kv_capacity=float(rng.integers(1650, 1900)) if tight else 100_000.0,
            per_uneven=rng.choice([1e-7, 4e-6]) if uneven else 0.0,
            spec_tokens=int(rng.integers(1, 6)) if speculation else 0,
            spec_acceptance=float(rng.choice([0.0, 0.4, 0.77, 1.0])) if speculation else 0.0,
            spec_batch=int(rng.choice([1, 3, 16])),
            spec_draft=rng.uniform(0, 0.002) if speculation else 0.0,
            lora_slots=int(rng.integers(1, 4)) if adapters else 0,
            lora_load=rng.uniform(0, 0.05),
        )
        for _ in range(m)
    ]
    prompt = np.clip(rng.lognormal(5, 1.2, n), 1, 1200).astype(int)
    output = np.clip(rng.lognormal(4, 1.3, n), 1, 400).astype(int)
    at = np.cumsum(rng.exponential(rng.choice([0.005, 0.05]), n))
    where = rng.integers(0, m - split, n)
    fresh, blocks = 8, []
    for i in range(n):
        chain = (
            list(range(int(rng.integers(0, 4)) * 2, 8)) if prefixes and rng.random() < 0.8 else []
        )
        chain = chain[: -(-prompt[i] // block)]
        extra = -(-int(prompt[i]) // block) - len(chain) if prefixes else 0
        blocks.append(chain + list(range(fresh, fresh + extra)))
        fresh += extra
        if prefixes and blocks and rng.random() < 0.4:  # repeat an earlier prompt's prefix
            old = blocks[int(rng.integers(0, len(blocks)))]
            blocks[-1] = old[: len(blocks[-1])]
    script = [(t, "enter", i, int(r)) for i, (t, r) in enumerate(zip(at, where, strict=True))]
    if aborts:
        gone = np.flatnonzero(rng.random(n) < 0.3)
        script += [(at[i] + rng.exponential(0.3), "abort", int(i), 0) for i in gone]
    if hands:
        handed = np.flatnonzero(rng.random(n) < 0.5)
        script += [(at[i] + rng.exponential(0.6), "hand", int(i), int(rng.integers(0, m)))
                   for i in handed]  # fmt: skip
    if deaths:
        script += [(at[-1] * 0.4, "kill", 0, 0), (at[-1] * 0.6, "revive", 0, 0)]
    script.sort(key=lambda entry: entry[0])
    target = m - 1 if split else None
    named = rng.integers(-1, 5, n) if adapters else np.full(n, sim.NONE)
    return profiles, block, prompt, output, blocks, script, target, named


FEATURES = (
    "prefixes", "tight", "aborts", "deaths", "uneven", "speculation", "adapters", "hands",
)  # fmt: skip
CASES = {
    "plain": {},
    "preemption": {"tight": True},
    "prefixes": {"prefixes": True},
    "prefixes and preemption": {"prefixes": True, "tight": True},
    "aborts": {"aborts": True, "tight": True, "prefixes": True},
    "deaths": {"deaths": True, "tight": True, "prefixes": True},
    "split": {"split": 1, "tight": True},
    "uneven contexts": {"uneven": True, "aborts": True},
    "speculation": {"speculation": True},
    "speculation and preemption": {"speculation": True, "tight": True, "split": 1},
    "adapters": {"adapters": True, "aborts": True},
    "hand-over": {"hands": True, "split": 1, "aborts": True},
    "hand-over of shared prefixes": {
        "hands": True,
        "prefixes": True,
        "tight": True,
        "deaths": True,
    },
    "everything": dict.fromkeys(FEATURES, True) | {"split": 1},
}


def both(seed, features):
    full = dict.fromkeys(FEATURES, False) | {"split": 0} | features
    profiles, block, prompt, output, blocks, script, target, named = scenario(seed, **full)
    flat = np.array([b for row in blocks for b in row], np.int64)
    start = np.cumsum([0, *(len(row) for row in blocks)])
    per_token, latency, layers = 4e-5, 0.002, 12
    specs = [ReplicaSpec(name=str(k), variant="v", profile=p) for k, p in enumerate(profiles)]
    ph = sim.physics(
        specs,
        len(prompt),
        blocks=flat,
        block_tokens=block,
        move_per_token=per_token,
        move_latency=latency,
        layers=layers,
        adapters=5,
    )
    for j in range(len(prompt)):
        d = sim.NONE if target is None else target
        sim.set_job(ph, j, prompt[j], output[j], d, start[j], start[j + 1])
        sim.set_adapter(ph, j, named[j])
    jobs = [
        Job(j, int(prompt[j]), int(output[j]), list(blocks[j]), target,
            adapter=None if named[j] == sim.NONE else int(named[j]))
        for j in range(len(prompt))
    ]  # fmt: skip
    fleet = Fleet(profiles, block, per_token, latency, layers)
    fleet.run([(t, kind, jobs[j], r) for t, kind, j, r in script])
    times = [[np.nan if v is None else v for v in column] for column in zip(
        *((j.first, j.finish, j.lost) for j in jobs), strict=True)]  # fmt: skip
    return ph, drive(ph, script, len(prompt)), [np.array(c) for c in times], fleet


@pytest.mark.parametrize("features", CASES.values(), ids=CASES.keys())
def test_closed_forms_agree_with_every_iteration(features):
    """Times of first token, end and loss to 1e-9 s, on random fleets."""
    preemptions = hits = ends = loads = 0
    for seed in range(15):
        ph, ours, theirs, fleet = both(seed, features)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
        assert ph.replica["preemptions"].sum() >= sum(e.preemptions for e in fleet.engines)
        preemptions += ph.replica["preemptions"].sum()
        hits += np.maximum(ph.job["hits"], 0).sum()
        ends += np.isfinite(ours[1]).sum()
        loads += sum(e.loads for e in fleet.engines)
    assert ends > 300
    if features.get("tight"):
        assert preemptions > 30
    if features.get("prefixes"):
        assert hits > 10_000
    if features.get("adapters"):
        assert loads > 60


# ---- against theory


@njit(cache=True, error_model="numpy")
def serve_in_order(ph, at, prompt, first):
    """One replica, one-token answers; writes the times of the first token."""
    kinds, jobs = np.zeros(8, np.int64), np.zeros(8, np.int64)
    for j in range(len(at)):
        sim.set_job(ph, j, prompt[j], 1, sim.NONE, 0, 0)
    i = 0
    while True:
        now = ph.replica[0].end
        if i < len(at) and at[i] <= now:
            sim.enter(ph, 0, i, at[i])
            if sim.idle(ph, 0):
                sim.plan(ph, 0, at[i])
            i += 1
            continue
        if now == np.inf:
            return
        for k in range(sim.fire(ph, 0, kinds, jobs)):
            if kinds[k] == sim.FIRST_TOKEN:
                first[jobs[k]] = now
        sim.plan(ph, 0, now)


def mean_wait(prompt, load, rng):
    """Mean seconds that requests wait before service on a server with 1e-4 s a prompt token."""
    one = spec(
        overhead=0.0, weights=0.0, per_sequence=0.0, per_context=0.0, per_attention=0.0,
        per_token=1e-4, chunk=10**9, max_seqs=1, kv_capacity=1e9, max_context=10**9,
    )  # fmt: skip
    service = prompt * 1e-4
    at = np.cumsum(rng.exponential(service.mean() / load, len(prompt)))
    first = np.zeros(len(prompt))
    serve_in_order(sim.physics([one], len(prompt)), at, prompt, first)
    return (first - at - service).mean(), service


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_exponential_service_waits_like_m_m_1(load):
    """W = load / (1 - load) E[S]."""
    rng = np.random.default_rng(2)
    prompt = np.ceil(rng.exponential(2000.0, 400_000)).astype(np.int64)
    wait, service = mean_wait(prompt, load, rng)
    assert wait == pytest.approx(load / (1 - load) * service.mean(), rel=0.04)


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_general_service_waits_like_m_g_1(sigma):
    """W = arrivals/s E[S^2] / (2 (1 - load)), Pollaczek and Khinchine."""
    rng = np.random.default_rng(4)
    prompt = np.ceil(rng.lognormal(7.0, sigma, 400_000)).astype(np.int64)
    wait, service = mean_wait(prompt, 0.7, rng)
    expected = 0.7 / service.mean() * (service**2).mean() / (2 * 0.3)
    assert wait == pytest.approx(expected, rel=0.04)


# ---- looking, and small stories


def test_looking_changes_nothing_and_counts_whole_tokens():
    ph = sim.physics(
        [spec(overhead=0.0, weights=0.01, per_sequence=0.0, per_context=1e-6, chunk=4096)], 1
    )
    sim.set_job(ph, 0, 100, 50, sim.NONE, 0, 0)
    assert sim.enter(ph, 0, 0, 0.0)
    sim.plan(ph, 0, 0.0)
    kinds, jobs = np.zeros(9, np.int64), np.zeros(9, np.int64)
    assert sim.fire(ph, 0, kinds, jobs) == 1
    first = float(ph.replica["clock"][0])
    sim.plan(ph, 0, first)
    before = {name: np.copy(column) for name, column in ph._asdict().items()}
    times = first + np.linspace(0, 0.6, 200)
    counts = [sim.tokens_out(ph, 0, t) for t in times]
    # step i takes 0.01 + 1e-6 (101 + i) seconds, one token each
    ends = np.cumsum(0.01 + 1e-6 * (101 + np.arange(49)))
    assert counts == [1 + np.searchsorted(ends, t - first, "right") for t in times]
    for name, column in ph._asdict().items():
        np.testing.assert_array_equal(column, before[name], err_msg=name)


def test_a_request_that_can_never_fit_is_refused():
    ph = sim.physics([spec(kv_capacity=160.0, max_context=1000)], 2)
    sim.set_job(ph, 0, 150, 11, sim.NONE, 0, 0)
    sim.set_job(ph, 1, 150, 10, sim.NONE, 0, 0)
    assert not sim.enter(ph, 0, 0, 0.0)
    assert sim.enter(ph, 0, 1, 0.0)


def test_fractional_prefix_blocks_are_refused():
    with pytest.raises(ValueError, match="whole number"):
        sim.physics([spec()], 1, block_tokens=12.5)
