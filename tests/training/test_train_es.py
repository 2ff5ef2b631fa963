"""Training the learned set scorer: from the rule on, resumed, and only what helps is kept."""

import json

import numpy as np
import pytest

from domain.errors import ConfigError
from policies.factory import build_scorer
from training import train_es
from training.compare import policy_of
from training.scenario import Promise, Replicas, Scenario
from training.train_es import DIMENSIONS, RULE, Job, Trained, policy_at, train
from training.tune import KNOBS
from training.worlds import World

TEMPLATE = Scenario(
    name="t",
    fleet=(Replicas(profile="h100-bf16-14b"),),
    classes={"fast": Promise(tpot=0.03), "slow": Promise(rank=1)},
)


class Pretended(train_es.Arena):
    """Worlds without requests: a policy is as good as its weight of one trait is near 0.3."""

    def __init__(self, job, sign=1.0):
        self.job = job
        self.sign = sign
        self.runs = 0

    def world(self, part, k):
        return World(scenario=TEMPLATE, skew=None, constants=(1.0, 1.0))

    def cases(self, world, seed):
        return [0.02 * load for load in train_es.LOADS]

    def fair(self, case, policy):
        self.runs += 1
        weight = (getattr(policy, "weights", None) or {}).get("slow", {}).get("tight", 0.0)
        return 0.95 - case + self.sign * (0.09 - (weight - 0.3) ** 2)


def job(**fields):
    return Job(
        **{"scenarios": ("t",), "generations": 12, "population": 8, "every": 3, "seed": 5} | fields
    )


def test_the_search_starts_at_the_marginal_rule():
    """The origin has the rule's constants and no residual, and holds back as the rule does."""
    policy = policy_at(np.zeros(DIMENSIONS))
    assert policy.weights == {} == policy.hold_more
    rule, start = build_scorer(RULE), build_scorer(policy)
    assert np.array_equal(start.params[: len(rule.params)], rule.params)
    assert not start.params[len(rule.params) + 1 :].any()
    assert (policy.shed_below, policy.alpha_max) == (RULE.shed_below, RULE.alpha_max)


@pytest.mark.parametrize("kind", ["actor", *KNOBS])
def test_every_coordinate_changes_the_policy(kind):
    """Of the learned scorer and of every rule that is tuned; a rule starts with its defaults."""
    space = job(kind=kind)
    plain = space.policy(np.zeros(space.dimensions))
    assert all(space.policy(row) != plain for row in np.eye(space.dimensions))
    assert kind == "actor" or plain == space.start == policy_of(kind, {})


def test_a_rule_is_tuned_on_the_same_worlds(tmp_path):
    """Its constants are searched; what is kept is of its kind, and better than its defaults."""

    class Wide(Pretended):
        def fair(self, case, policy):
            return 0.9 - case - (policy.ttft_margin - 0.5) ** 2

    found = train(Wide(job(kind="best_fit", generations=20)), tmp_path)
    assert found.best.gain > 0.0
    assert found.policy.kind == "best_fit"
    assert abs(found.policy.ttft_margin - 0.5) < 0.1


def test_training_finds_what_helps(tmp_path):
    """The weight that the pretended worlds reward, judged where it was not trained."""
    found = train(Pretended(job(generations=60)), tmp_path)
    assert found.best.gain > 0.0
    assert found.policy.weights["slow"]["tight"] > 0.05


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path):
    """Half a line at the end and a smaller number of generations before change nothing."""
    whole = train(Pretended(job()), tmp_path / "whole")
    train(Pretended(job(generations=5)), tmp_path / "cut")
    log = tmp_path / "cut" / "generations.jsonl"
    log.write_text(log.read_text() + '{"gains": [0.1, 0.')
    arena = Pretended(job())
    rest = train(arena, tmp_path / "cut")
    assert rest.policy == whole.policy
    assert rest.fitness == whole.fitness
    assert [j.gain for j in rest.curve] == [j.gain for j in whole.curve if j.generation != 5]
    again = Pretended(job())
    assert train(again, tmp_path / "cut").policy == whole.policy
    assert again.runs == 0


def test_another_job_does_not_go_on_in_this_folder(tmp_path):
    train(Pretended(job(generations=2)), tmp_path)
    with pytest.raises(ConfigError, match="another job"):
        train(Pretended(job(generations=2, seed=6)), tmp_path)


def test_where_nothing_helps_the_rule_stays(tmp_path):
    """Every step away from the rule is a loss on the validation worlds."""

    class Flat(Pretended):
        def fair(self, case, policy):
            return 0.95 - case - (policy.kind == "actor") * 0.01

    found = train(Flat(job()), tmp_path)
    assert found.best.generation == 0
    assert found.policy == policy_at(np.zeros(DIMENSIONS))


def test_a_budget_of_minutes_stops_it(tmp_path):
    found = train(Pretended(job(generations=500)), tmp_path, minutes=0.0)
    assert len(found.fitness) < 500


@pytest.mark.parametrize(
    "words", [["--population", "2"], ["--generations", "0"], ["--scenario", "absent.yaml"]]
)
def test_what_cannot_be_trained_is_refused(words, tmp_path):
    """Before anything is compiled or written."""
    path = tmp_path / "t.yaml"
    path.write_text(TEMPLATE.model_dump_json())
    with pytest.raises(ConfigError):
        train_es.main(["--scenario", str(path), "--out", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_a_loss_counts_twice():
    """Ten points of the share of targets won in one world and lost in another are no gain."""
    up, down = [[0.96]], [[0.92]]
    assert train_es.gain(up, down) == pytest.approx(-train_es.gain(down, up) / 2.0)


def test_progress_tells_goodput_against_the_rule(tmp_path):
    told = []
    train(Pretended(job()), tmp_path, lambda *words: told.append(words))
    assert [done for done, _, _ in told] == list(range(1, 13))
    assert "of the start" in told[-1][2]


def test_report_and_card_are_plain(tmp_path):
    """The card is JSON and names the command, the seed and what validation said."""
    found = train(Pretended(job(generations=30)), tmp_path)
    card = train_es._card(job(), found, "sluice train policy --scenario a.yaml")
    assert json.loads(json.dumps(card)) == card
    assert card["validation"]["goodput@90 over the start"] >= 1.0
    assert isinstance(found, Trained)
