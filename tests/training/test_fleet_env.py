"""The training environment: gymnasium's own checker, its promises one by one, and the engine that
walks through every iteration behind it.
"""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from policies import encoding
from tests.backends.sim.naive import Fleet, Job
from training.fleet_env import FleetEnv, FleetVectorEnv, Randomisation

pytestmark = pytest.mark.slow  # compiles for a minute where nothing is cached

SMALL = Randomisation(requests=60, fleet_size=(2, 6))
P_SLO = encoding.ROUTE_FEATURES.index("p_slo")
OWN = encoding.ROUTE_FEATURES.index("own_running")


def uniform(rng, mask):
    """A uniform choice of what is allowed."""
    return int(rng.choice(np.flatnonzero(mask)))


def best_chance(_rng, observation, mask):
    """The replica that most likely keeps every limit, the emptier of equals; hold where none has
    room.
    """
    m = len(mask) - 2
    if not mask[:m].any():
        return m if mask[m] else m + 1
    routes = observation["routes"]
    return int(np.where(mask[:m], routes[:, P_SLO] - 0.01 * routes[:, OWN], -1).argmax())


def never_held(rng, observation, mask):
    """The same, but refuse where none has room."""
    m = len(mask) - 2
    return best_chance(rng, observation, mask) if mask[:m].any() else m + 1


def episode(env, choose, seed, **options):
    """Sum of rewards, steps, last info and sums of its counts."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed, options=options)
    total, steps, over = 0.0, 0, False
    sums = dict.fromkeys(("elapsed", "met", "missed", "refused"), 0)
    sums["elapsed"] += info["elapsed"]
    while not over:
        action = choose(rng, observation, info["action_mask"])
        observation, reward, terminated, truncated, info = env.step(action)
        for name in sums:
            sums[name] += info[name]
        total += reward
        steps += 1
        over = terminated or truncated
    return total, steps, info, sums, terminated


@pytest.fixture(scope="module")
def env():
    return FleetEnv(SMALL)


def test_gymnasiums_checker_passes():
    """Spaces, seeds, determinism, copies. There is nothing to render."""
    check_env(FleetEnv(SMALL), skip_render_check=True)


def test_an_episode_settles_every_request_and_pays_for_those_in_time(env):
    for seed in range(6):
        total, _, info, sums, terminated = episode(env, lambda r, _, m: uniform(r, m), seed)
        assert terminated
        assert sums["met"] + sums["missed"] == SMALL.requests
        assert total == sums["met"]
        assert sums["elapsed"] == pytest.approx(info["now"])
        assert info["action_mask"].tolist() == [0] * (SMALL.fleet_size[1] + 1) + [1]


def test_the_same_seed_is_the_same_and_another_is_not(env):
    runs = [episode(env, best_chance, s) for s in (1, 1, 2)]
    kept = [(total, steps, sums) for total, steps, _, sums, _ in runs]
    assert kept[0] == kept[1]
    assert kept[0] != kept[2]


def test_refusing_everything_earns_nothing(env):
    total, steps, _, sums, _ = episode(env, lambda _r, _o, m: len(m) - 1, 3)
    assert (total, steps) == (0.0, SMALL.requests)
    assert sums["refused"] == sums["missed"] == SMALL.requests


def test_a_good_choice_earns_more_than_a_uniform_one():
    """Over the same episodes."""
    env = FleetEnv(Randomisation(requests=200, fleet_size=(4, 8)))
    seeds = range(8)
    blind = sum(episode(env, lambda r, _, m: uniform(r, m[:-2]) if m[:-2].any() else uniform(r, m),
                        s)[0] for s in seeds)  # fmt: skip
    seeing = sum(episode(env, best_chance, s)[0] for s in seeds)
    assert seeing > 1.05 * blind


def test_what_is_held_is_asked_about_again(env):
    """Holding first costs decisions, and nothing is lost."""

    def patient(rng, _observation, mask):
        m = len(mask) - 2
        return m if mask[m] and rng.random() < 0.5 else uniform(rng, mask)

    _, steps, _, sums, _ = episode(env, patient, 5, load=(1.2, 1.3))
    assert steps > SMALL.requests + 20
    assert sums["met"] + sums["missed"] == SMALL.requests


def test_decisions_are_bounded():
    env = FleetEnv(Randomisation(requests=60, fleet_size=(2, 6), max_decisions=25))
    _, steps, _, _, terminated = episode(env, best_chance, 1)
    assert (steps, terminated) == (25, False)


def test_an_action_outside_the_mask_is_hold_or_refuse(env):
    """A replica that is not there is never used."""
    env.reset(seed=1, options={"fleet_size": (2, 2)})
    _, reward, _, _, info = env.step(5)
    assert info["fleet_size"] == 2
    assert (reward, info["refused"]) == (0.0, 0)
    _, _, _, sums, _ = episode(env, lambda _r, _o, _m: 5, 1, fleet_size=(2, 2))
    assert sums["met"] == 0
    assert sums["missed"] == SMALL.requests


def test_rows_of_absent_replicas_are_empty_and_all_is_within_bounds(env):
    sizes = set()
    rng = np.random.default_rng(0)
    for seed in range(16):
        observation, info = env.reset(seed=seed)
        for _ in range(20):
            size = info["fleet_size"]
            sizes.add(size)
            assert env.observation_space.contains(observation)
            assert observation["routes"][:size, 0].all()
            assert not observation["routes"][size:].any()
            assert not info["action_mask"][size:-2].any()
            room = observation["routes"][:, 2].astype(bool)
            assert np.array_equal(room, info["action_mask"][:-2].astype(bool))
            observation, _, terminated, _, info = env.step(uniform(rng, info["action_mask"]))
            if terminated:
                break
    assert len(sizes) > 3


def test_other_gateways_show_late_and_only_as_aggregates():
    env = FleetEnv(SMALL)
    foreign = encoding.ROUTE_FEATURES.index("foreign_running")
    seen = {}
    for gateways in (1, 2):
        options = {"gateways": (gateways, gateways), "load": (1.0, 1.0), "delay": (0.5, 0.5)}
        observation, info = env.reset(seed=4, options=options)
        early, total, over = 0.0, 0.0, False
        while not over:
            shown = float(observation["routes"][:, foreign].sum())
            early += shown if info["now"] < 0.5 else 0.0
            total += shown
            action = best_chance(None, observation, info["action_mask"])
            observation, _, over, _, info = env.step(action)
        seen[gateways] = early, total
    assert seen[1][1] == 0.0
    assert seen[2][0] == 0.0
    assert seen[2][1] > 1.0


def test_the_vector_lives_as_single_fleets_do():
    """Observation by observation, past the end of an episode."""
    drawn = Randomisation(requests=25, fleet_size=(2, 5))
    many, ones = FleetVectorEnv(3, drawn), [FleetEnv(drawn) for _ in range(3)]
    rng = np.random.default_rng(3)
    observation, info = many.reset(seed=10)
    singles = [env.reset(seed=10 + k) for k, env in enumerate(ones)]
    over = [False] * 3
    ends = 0
    for _ in range(150):
        for k in range(3):
            for name, value in singles[k][0].items():
                np.testing.assert_array_equal(observation[name][k], value)
            for name, value in singles[k][-1].items():
                np.testing.assert_array_equal(info[name][k], value)
        actions = [uniform(rng, mask) for mask in info["action_mask"]]
        observation, reward, terminated, truncated, info = many.step(np.array(actions))
        for k, env in enumerate(ones):
            if over[k]:
                singles[k] = env.reset()
                assert reward[k] == 0.0
                over[k] = False
                continue
            singles[k] = env.step(actions[k])
            assert singles[k][1:4] == (reward[k], terminated[k], truncated[k])
            over[k] = bool(terminated[k] or truncated[k])
            ends += over[k]
    assert ends > 4


def test_its_replicas_are_the_step_by_step_engine():
    """First tokens and rewards of an episode, from what was sent where and when."""
    env = FleetEnv(Randomisation(requests=120, fleet_size=(3, 3), gateways=(1, 1)))
    total = episode(env, never_held, 11)[0]
    fleets = env._stable.fleets
    rows, replica = fleets.requests[0], fleets.physics.replica[0]
    profiles = [
        replace(
            env._drawn.kinds[0].profile,
            **{n: float(replica[n][r]) for n in (
                "overhead", "weights", "per_sequence", "per_context", "per_token",
                "per_attention")},
            chunk=int(replica["chunk"][r]),
            kv_capacity=float(replica["pages"][r] * 16),
        )
        for r in range(3)
    ]  # fmt: skip
    sent = np.flatnonzero(np.isfinite(rows["sent"]))
    jobs = {i: Job(i, int(rows["tokens"][i]), int(rows["output"][i])) for i in sent.tolist()}
    script = [(rows["sent"][i], "enter", jobs[i], int(rows["replica"][i])) for i in sent.tolist()]
    Fleet(profiles, 16, 0, 0, 1).run(sorted(script, key=lambda entry: entry[0]))
    first = np.array([jobs[i].first for i in sent.tolist()])
    last = np.array([jobs[i].finish for i in sent.tolist()])
    np.testing.assert_allclose(rows["first"][sent], first, rtol=0, atol=1e-9)
    arrival, output = rows["arrival"][sent], rows["output"][sent]
    pace = np.where(output > 1, (last - first) / np.maximum(output - 1, 1), 0.0)
    met = (first - arrival <= rows["ttft"][sent]) & (pace <= rows["tpot"][sent])
    met &= last - arrival <= rows["e2e"][sent]
    assert total == met.sum()
    assert 20 < total < 120


def test_episodes_larger_than_the_room_are_refused(env):
    with pytest.raises(ValueError, match="larger"):
        env.reset(options={"fleet_size": (2, 7)})
    with pytest.raises(ValueError, match="unknown options"):
        env.reset(options={"size": 3})
