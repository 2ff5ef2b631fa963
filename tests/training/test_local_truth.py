"""The comparison with a real fleet: what it says of simulators that are right and wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest

from backends.sim.profiles import read_profiles, shipped, write_profiles
from benchmarks import local_truth
from benchmarks.local_truth import (
    PAIR,
    Calibrated,
    Verdict,
    case_of,
    main,
    order_of,
    pair_config,
    promise_of,
    simulated,
)
from sluice.settings import load

POLICIES = ("round_robin", "least_requests")
ROUNDS = 3


def profiles():
    known = read_profiles(shipped() / "local.yaml")
    return {
        name: next(p for p in known.values() if p.key.precision == precision)
        for name, precision in PAIR.items()
    }


TEMPLATE = 24.0
"""Tokens with which every prompt begins; the engines have them in their caches."""


def requests(n):
    rng = np.random.default_rng(3)
    prompts = rng.integers(10, 60, n).tolist()
    return [
        {"index": i, "due": 1.5 * i, "prompt": prompt, "prompt_tokens": prompt + TEMPLATE,
         "cached": TEMPLATE, "wanted": int(rng.integers(5, 30)), "status": 200, "error": "",
         "tokens": 0.0, "first": None, "last": None, "ended": None, "request_id": f"r{i}"}
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Finished runs of a fleet that is the simulator's, but for 5 % of noise in every time."""
    plan = requests(80)
    config = pair_config(local_truth.ROOT / "configs" / "local.yaml", tmp_path)
    found = Calibrated(profiles=profiles(), delays=dict.fromkeys(PAIR, 0.01))
    rng = np.random.default_rng(1)
    settings = load(config)
    case = case_of(settings, promise_of(settings, None), found, [plan])
    for policy in POLICIES:
        rows = simulated(case, policy, found)
        for k in range(ROUNDS):
            run = tmp_path / f"{k}-{policy}"
            run.mkdir()
            lines = []
            for line, row in zip(plan, rows, strict=True):
                ttft, e2e = row["ttft"] * np.exp(rng.normal(0, 0.05)), row["e2e"]
                e2e = ttft + (e2e - row["ttft"]) * np.exp(rng.normal(0, 0.05))
                times = {"first": line["due"] + ttft, "last": line["due"] + e2e}
                lines.append({**line, **times, "ended": times["last"], "tokens": line["wanted"]})
            told = [{k: v for k, v in line.items() if k != "cached"} for line in lines]
            (run / "requests.jsonl").write_text("\n".join(map(json.dumps, told)))
            decided = [
                {"id": f"r{i}", "outcome": {"sent": 0.1, "cached_tokens": TEMPLATE}}
                for i in range(len(plan))
            ]
            (run / "decisions.jsonl").write_text("\n".join(map(json.dumps, decided)))
            (run / "report.json").write_text("{}")
            (run / "gateway.yaml").write_text(config.read_text())
    keep(tmp_path, found.profiles)
    return tmp_path


def keep(folder, found):
    given = {name: (p, {}) for name, p in found.items()}
    write_profiles(folder / "profiles.yaml", source="t", licence="t", profiles=given)
    (folder / "delays.json").write_text(json.dumps(dict.fromkeys(PAIR, 0.01)))


def reported(folder, capsys):
    words = ["--out", str(folder), "--report", "--rounds", str(ROUNDS)]
    assert main([*words, "--policies", ",".join(POLICIES)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_simulator_that_is_right_is_within_the_noise(folder, capsys):
    lines = reported(folder, capsys)
    assert [line.endswith("kept |") for line in lines if "robin" in line] == [True]
    assert [line.endswith("kept |") for line in lines if "least" in line] == [True]
    assert lines[-1].startswith("Of 1 pairs")


def test_what_the_engines_had_in_their_caches_is_not_computed(folder):
    """The simulator's prompts are what is left of those that the engines counted."""
    lines = local_truth.read_run(folder / "0-round_robin")
    settings = load(folder / "0-round_robin" / "gateway.yaml")
    found = Calibrated(profiles=profiles(), delays=dict.fromkeys(PAIR, 0.01))
    case = case_of(settings, promise_of(settings, None), found, [lines])
    assert case.trace.prompt.tolist() == [line["prompt_tokens"] - TEMPLATE for line in lines]


def test_one_that_is_a_fifth_too_slow_is_not(folder, capsys):
    keep(folder, {n: replace(p, weights=1.2 * p.weights) for n, p in profiles().items()})
    lines = reported(folder, capsys)
    assert sum(line.endswith("missed |") for line in lines) == 2


def test_the_time_to_go_shrinks_with_every_run_that_is_kept(folder, capsys):
    def minutes():
        assert main(["--out", str(folder), "--plan", "--policies", "round_robin"]) == 0
        return int(capsys.readouterr().err.split()[1])

    before = minutes()
    (folder / "rate.json").write_text("1.0")
    known = minutes()
    (folder / "4-round_robin").mkdir()
    (folder / "4-round_robin" / "report.json").write_text("{}")
    assert before > known > minutes()


def verdict(policy, real, floor, simulator):
    return Verdict(policy=policy, runs=5, real=real, floor=floor, simulator=simulator, measures={})


def test_only_pairs_that_differ_by_more_than_noise_count():
    found = order_of(
        [verdict("a", 0.9, 0.02, 0.7), verdict("b", 0.8, 0.02, 0.8), verdict("c", 0.81, 0.02, 0.6)]
    )
    assert (found.pairs, found.differ, found.kept) == (3, 2, 1)
    assert found.broken == ("a / b",)
