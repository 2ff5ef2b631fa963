from dataclasses import replace

import numpy as np
import pytest

from domain.errors import ConfigError
from domain.fleet import Profile
from training.calibrate_report import waiting
from training.calibrate_runs import (
    FittedRun,
    RequestRun,
    fit_runs,
    from_decisions,
    live,
    median_errors,
)

TRUE = Profile(
    overhead=0.002,
    weights=0.02,
    per_sequence=5e-5,
    per_context=1.5e-7,
    per_token=8e-5,
    per_attention=2e-9,
    chunk=512,
    max_seqs=24,
    kv_capacity=30_000.0,
)


def run_of(profile, seed=0, n=80, rate=4.0):
    """A run as that replica would have given it, overloaded as the recorded ones."""
    rng = np.random.default_rng(seed)
    blank = RequestRun(
        name="run",
        at=np.r_[0.0, np.cumsum(rng.exponential(1 / rate, n - 1))],
        prompt=rng.integers(100, 1500, n).astype(float),
        output=rng.integers(100, 400, n).astype(float),
        ttft=np.ones(n),
        e2e=np.ones(n),
    )
    lived = live(FittedRun(profile, 0.03), blank)
    return replace(blank, ttft=lived.ttft, e2e=lived.e2e)


def test_a_lone_request_takes_what_the_formula_says():
    """One prompt in one chunk, then steps of one sequence with growing context."""
    run = RequestRun(
        name="one", at=np.zeros(1), prompt=np.array([100.0]), output=np.array([3.0]),
        ttft=np.ones(1), e2e=np.ones(1),
    )  # fmt: skip
    lived = live(FittedRun(TRUE, 0.5), run)
    prefill = 0.002 + max(0.02, 8e-5 * 100 + 2e-9 * 5000)
    step = 0.002 + 5e-5 + 0.02
    assert lived.ttft[0] == pytest.approx(prefill + 0.5)
    assert lived.e2e[0] == pytest.approx(0.5 + prefill + 2 * step + 1.5e-7 * (101 + 102))


def test_the_rest_of_a_run_follows_from_its_first_fifth():
    """Constants a third off are found again from 20 % of the requests: the rest within 4 %."""
    run = run_of(TRUE)
    seen = np.arange(len(run.at)) < 16
    start = replace(TRUE, weights=0.026, per_token=5.5e-5, per_context=2e-7)
    before = median_errors(live(FittedRun(start, 0.02), run), run, ~seen)
    found = fit_runs([run], [seen], start, evaluations=300)
    after = median_errors(live(found, run), run, ~seen)
    assert max(after) < 0.04
    assert max(before) > 2 * max(after)


def test_unseen_times_are_not_read():
    """Spoiling what the fit may not see changes nothing."""
    run = run_of(TRUE, n=30)
    seen = np.arange(30) < 10
    spoilt = replace(run, ttft=np.where(seen, run.ttft, 99.0), e2e=np.where(seen, run.e2e, 999.0))
    start = replace(TRUE, weights=0.03)
    assert fit_runs([run], [seen], start, evaluations=40) == fit_runs(
        [spoilt], [seen], start, evaluations=40
    )


def test_waiting_counts_come_and_served():
    """Of three requests one waits at first, two in the middle, none at the end."""
    arrived, ttft = np.array([0.0, 1.0, 2.0]), np.array([1.5, 2.0, 0.5])
    assert waiting(arrived, ttft, np.array([0.5, 2.1, 9.0])).tolist() == [1.0, 2.0, 0.0]


def record(**change):
    """A decision-log line's part that calibration reads."""
    outcome = {
        "cause": "finished", "sent": 0.25, "ttft": 1.25, "e2e": 3.25, "prompt_tokens": 50.0,
        "completion_tokens": 20.0, "cached_tokens": 10.0, **change.pop("outcome", {}),
    }  # fmt: skip
    return {"at": 100.0, "replica": "full", "attempts": 1, "outcome": outcome, **change}


def test_a_decision_log_becomes_runs():
    """Times count from when the replica got it, cached tokens cost nothing, order is by arrival."""
    later = record(at=101.0, outcome={"cause": "client_gone"})
    runs = from_decisions([later, record(), record(attempts=2), record(replica=None)], "log")
    run = runs["full"]
    assert run.at.tolist() == [0.0, 1.0]
    assert run.prompt.tolist() == [40.0, 40.0]
    assert run.ttft.tolist() == [1.0, 1.0]
    assert run.e2e[0] == 3.0
    assert np.isnan(run.e2e[1])


def test_a_log_of_nothing_is_refused():
    """Refused requests alone calibrate nothing; runs must be in order."""
    with pytest.raises(ConfigError, match=r"my\.jsonl: no request that a replica answered"):
        from_decisions([record(replica=None)], "my.jsonl")
    with pytest.raises(ConfigError, match="arrivals must ascend"):
        replace(run_of(TRUE, n=3), at=np.array([0.0, 2.0, 1.0]))
    with pytest.raises(ConfigError, match="output tokens must be at least 1"):
        replace(run_of(TRUE, n=3), output=np.zeros(3))
