"""PPO over many fleets: from the rule on, resumed, and only what helps is kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from domain.errors import ConfigError
from policies.factory import build_scorer
from policies.names import NETWORK_INPUTS
from policies.scorers.network import K
from training import train_ppo
from training.fleet_env import FleetVectorEnv
from training.scenario import Promise, Replicas, Scenario
from training.set_network import SetNetwork
from training.set_view import Watcher
from training.train_es import Judged
from training.train_ppo import Job, Multiplier, Rollout, advantages, collect, policy_of, train

SMALL = Job(updates=4, fleets=4, steps=40, paired=2, width=4, requests=60, every=2, batches=2)


def judged(number, gain):
    ratio = {"0.9": 1.0 + gain, "0.99": 1.0}
    return Judged(generation=number, gain=gain, ratio=ratio, least=1.0, by_world=[])


def pleased(number, _policy):
    """The third and fourth update are the best and the worst."""
    return judged(number, {2: 0.02}.get(number, -0.01))


def rollout(reward, elapsed, ended, valid):
    """One with only what advantages need."""
    t, f = np.shape(reward)
    none = dict.fromkeys(Rollout._fields, np.zeros((t, f)))
    given = {"reward": reward, "elapsed": elapsed, "ended": ended, "valid": valid}
    return Rollout(**(none | {name: np.asarray(x) for name, x in given.items()}))


def test_advantages_discount_by_seconds():
    """Sum over later decisions of (gamma lambda) to the seconds between, as written out by hand;
    nothing passes an episode's end.
    """
    rng = np.random.default_rng(0)
    t, job = 6, Job(horizon=2.0, trace=0.5)
    reward, elapsed = rng.random((t, 1)), rng.uniform(0.0, 1.0, (t, 1))
    ended, valid = np.zeros((t, 1), bool), np.ones((t, 1), bool)
    ended[3], valid[4] = True, False
    values = rng.random((t + 1, 1))
    found = advantages(rollout(reward, elapsed, ended, valid), reward, values, job)
    for k in (0, 1, 2, 3, 5):
        wanted, seconds = 0.0, 0.0
        for j in range(k, 4 if k < 4 else t):
            after = 0.0 if ended[j] else np.exp(-elapsed[j, 0] / job.horizon) * values[j + 1, 0]
            delta = reward[j, 0] + after - values[j, 0]
            wanted += np.exp(-seconds * (1 / job.horizon + 1 / job.trace)) * delta
            seconds += elapsed[j, 0]
        assert found[k, 0] == pytest.approx(wanted)
    assert found[4, 0] == 0.0


def test_the_multiplier_answers_lateness_and_lets_go():
    """It rises while the class is later than under the rule, and is zero some time after."""
    controller = Multiplier()
    rising = [controller.update(0.03) for _ in range(10)]
    assert rising[-1] > rising[1] > 0.0
    assert max(controller.update(1.0) for _ in range(10)) == controller.most
    falling = [controller.update(-0.03) for _ in range(200)]
    assert falling[-1] == 0.0


def test_the_policy_starts_as_the_rule():
    plain = build_scorer(policy_of(Job(), None))
    assert np.array_equal(plain.params, train_ppo.RULE.params)
    heads = SetNetwork(4).layers()
    assert not any(map(any, (heads["route"], heads["hold"], heads["shed"], heads["bias"])))
    assert any(SetNetwork(4, warm=False).layers()["route"])


def test_without_randomisation_fleets_are_what_they_seem():
    drawn = replace(SMALL, randomised=False).worlds()
    assert drawn.constants == (1.0, 1.0)
    assert drawn.delay == (0.0, 0.0)
    assert SMALL.worlds().constants == SMALL.ranges.constants


@pytest.mark.parametrize(
    "words", [["--updates", "0"], ["--width", "0"], ["--scenario", "absent.yaml"]]
)
def test_what_cannot_be_trained_is_refused(words, tmp_path):
    """Before anything is compiled or written."""
    path = tmp_path / "t.yaml"
    template = Scenario(
        name="t",
        fleet=(Replicas(profile="h100-bf16-14b"),),
        classes={"fast": Promise(tpot=0.03), "slow": Promise(rank=1)},
    )
    path.write_text(template.model_dump_json())
    with pytest.raises(ConfigError):
        train_ppo.main(["--scenario", str(path), "--out", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_it_moves_towards_what_pays():
    """Where slow replicas have the advantage, a few updates make them likelier; KL is told."""
    torch.manual_seed(0)
    job, state = Job(width=8), train_ppo.fresh(Job(width=8), 3, 20)
    rng = np.random.default_rng(0)
    t, f, m = 16, 8, 3
    batch = {
        "inputs": torch.rand(t, f, m, K),
        "value": torch.zeros(t, f, m),
        "harm": torch.zeros(t, f, m),
        "worth": torch.ones(t, f),
        "mask": torch.tensor([True] * m + [False, False]).expand(t, f, m + 2).clone(),
    }
    slow = batch["inputs"][..., NETWORK_INPUTS.index("slow")]
    chosen, told = np.ones((t, f), bool), {}

    def logs():
        flat = {name: column.flatten(0, 1) for name, column in batch.items()}
        with torch.no_grad():
            return train_ppo._logits(job, state.network, flat).log_softmax(1).view(t, f, m + 2)

    def mean_slow():
        return float((logs()[..., :m].exp() * slow).sum(-1).mean())

    before = mean_slow()
    for _ in range(10):
        now = logs()
        batch["action"] = torch.distributions.Categorical(logits=now).sample()
        batch["log_prob"] = now.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        paid = slow.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1).double().numpy()
        told = train_ppo._improve(job, state, batch, chosen, paid, rng)
    assert mean_slow() > before + 0.05
    assert told["kl"] > 0.0
    assert told["entropy"] > 0.0


# ---- with the environment, which compiles for a minute where nothing is cached


@pytest.mark.slow
def test_views_are_those_of_the_environment():
    """P(SLO), room and waiting as the environment's own observation has them; what the rule does
    is what its kernel says.
    """
    env = FleetVectorEnv(6, replace(SMALL, requests=120).worlds(), copy=False)
    watcher = Watcher(env, train_ppo.RULE)
    _, info = env.reset(seed=3, options={"fleet_size": (2, 6)})
    rng, some = np.random.default_rng(0), 0
    for _ in range(150):
        view, room = watcher.look(), info["action_mask"][:, : env.hold].astype(bool)
        assert np.all(view.inputs[~room] == 0.0)
        assert np.all(view.value[~room] == 0.0)
        assert np.all(view.inputs[room][:, 0] == 1.0)
        observed = env._stable.results.routes[:, :, -1]
        np.testing.assert_allclose(view.inputs[:, :, 1][room], observed[room], atol=1e-6)
        some += int(view.may_wait.sum())
        choices = np.where(info["action_mask"], rng.random(info["action_mask"].shape), -1.0)
        _, _, _, _, info = env.step(choices.argmax(1))
    assert some > 0


@pytest.mark.slow
def test_rollouts_are_decided_by_seed():
    env = FleetVectorEnv(4, SMALL.worlds(), copy=False)
    watcher, network = Watcher(env, train_ppo.RULE), SetNetwork(4)
    many = [collect(env, watcher, network, SMALL, seed=s, most=4, greedy=False) for s in (1, 1, 2)]
    assert np.array_equal(many[0].action, many[1].action)
    assert np.array_equal(many[0].reward, many[1].reward)
    assert not np.array_equal(many[0].inputs, many[2].inputs)
    assert 0.0 < many[0].attainment(4) < 2.0
    assert np.all(many[0].mask[np.arange(40)[:, None], np.arange(4), many[0].action])


@pytest.mark.slow
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path):
    """Same policy, same figures, the best judgement kept; another job is refused."""
    whole = train(SMALL, tmp_path / "whole", pleased)
    train(replace(SMALL, updates=2), tmp_path / "cut", pleased)
    rest = train(SMALL, tmp_path / "cut", pleased)
    assert rest.policy == whole.policy
    assert rest.best.generation == 2
    plain = [[row._replace(seconds=0.0) for row in found.rows] for found in (whole, rest)]
    assert plain[0] == plain[1]
    assert rest.ranges == whole.ranges
    with pytest.raises(ConfigError, match="another job"):
        train(replace(SMALL, seed=2), tmp_path / "cut", pleased)


@pytest.mark.slow
def test_where_nothing_helps_the_rule_stays(tmp_path):
    """And without multipliers nothing presses."""
    job = replace(SMALL, multipliers=False)
    told = []
    found = train(job, tmp_path, lambda n, _p: judged(n, -0.01), lambda *words: told.append(words))
    assert found.policy == policy_of(job, None)
    assert all(row.mu == 0.0 for row in found.rows)
    assert [done for done, _, _ in told] == [1, 2, 3, 4]
    assert "rule" in told[-1][2]
