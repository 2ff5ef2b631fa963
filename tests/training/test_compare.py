"""The grid: what is finished is never run again, and a policy's seeds are everybody's."""

import json

import pytest
from pydantic import TypeAdapter

from backends.sim.profiles import shipped
from domain.errors import ConfigError
from policies import registry
from policies.config import PolicyConfig
from tests.fakes.small_fleet import LiveRunner, small
from training import compare, workers
from training.compare import Plan, Store, entrants, execute
from training.workers import Unit, Worker, results

LOADS = (0.5, 1.0, 1.6)


def plan(*policies, seeds=(1, 2), **fields):
    return Plan(
        scenarios=(small(**fields),),
        entrants=tuple(entrants(policies)),
        loads=LOADS,
        seeds=seeds,
    )


@pytest.fixture(autouse=True)
def _live(monkeypatch):
    """Small runs are not worth compiling the loop for."""
    monkeypatch.setattr(workers, "Runner", LiveRunner)


@pytest.fixture
def asked(monkeypatch):
    """How many policies x cases were run."""
    done = []
    real = Worker.reports

    def reports(self, unit):
        done.extend(unit.entrants)
        return real(self, unit)

    monkeypatch.setattr(Worker, "reports", reports)
    return done


def test_finished_cells_are_kept(tmp_path, asked):
    first = execute(plan("round_robin", "least_requests"), tmp_path)
    assert len(first.cells) == 2 * len(LOADS) * 2
    asked.clear()
    again = execute(plan("round_robin", "least_requests"), tmp_path)
    assert asked == []
    assert again.cells == first.cells
    execute(plan("round_robin", "least_requests", "lmetric", seeds=(1, 2, 3)), tmp_path)
    # a third policy on two seeds, all three on a third seed
    assert len(asked) == len(LOADS) * (2 + 3)


def test_a_line_cut_off_is_run_again(tmp_path, asked):
    execute(plan("round_robin", seeds=(1,)), tmp_path)
    path = tmp_path / "cells.jsonl"
    path.write_text(path.read_text()[:-40])
    asked.clear()
    again = execute(plan("round_robin", seeds=(1,)), tmp_path)
    assert len(asked) == 1
    assert len(again.cells) == len(LOADS)


def test_another_scenario_policy_or_profile_is_another_cell(tmp_path):
    store = Store(tmp_path, {})
    (one,) = entrants(["best_fit"])
    (other,) = entrants(["best_fit:ttft_margin=0.5"])
    unit = Unit(scenario=small(), entrants=(one,), seed=1, rate=3.0)
    late = Unit(scenario=small(gateways=2), entrants=(one,), seed=1, rate=3.0)
    keys = {store.key(unit, one), store.key(unit, other), store.key(late, one)}
    assert len(keys) == 3
    assert Store(tmp_path, {"h100-bf16-14b": 1}).key(unit, one) not in keys


def test_loads_are_multiples_of_the_best_heuristics_knee(tmp_path):
    outcome = execute(plan("marginal", seeds=(1,)), tmp_path)
    knee = outcome.knees["small"]
    assert knee.policy in compare.KNEE_POLICIES
    assert [c.report.rate for c in outcome.cells] == pytest.approx([x * knee.rate for x in LOADS])


def test_a_scenario_may_have_loads_of_its_own(tmp_path):
    outcome = execute(plan("round_robin", seeds=(1,), loads=(2.0,)), tmp_path)
    assert {c.load for c in outcome.cells} == {2.0}


def test_yardsticks_are_kept_too(tmp_path, monkeypatch):
    first = execute(plan("round_robin", seeds=(1,)), tmp_path, yardstick_seeds=1)
    assert len(first.yardsticks) == len(LOADS)
    monkeypatch.setattr(Worker, "yardstick", None)
    again = execute(plan("round_robin", seeds=(1,)), tmp_path, yardstick_seeds=1)
    assert again.yardsticks == first.yardsticks


def test_policies_are_named_in_words_and_files(tmp_path):
    path = tmp_path / "tuned.yaml"
    path.write_text("mine: {kind: best_fit, ttft_margin: 0.6}\n")
    found = {
        e.label: e.policy
        for e in entrants(["random", "w=marginal:size=1:shed_below=0.1", str(path)])
    }
    assert list(found) == ["random", "w", "mine"]
    assert (found["w"].size, found["w"].shed_below) == (1.0, 0.1)
    assert (found["mine"].ttft_margin, found["mine"].overload_target) == (0.6, 0.0)
    assert len(entrants(["all"])) == 14
    learned = {
        "kind": "actor",
        "weights": {"slow": {"one": 0.1}},
        "envelope": {"ttft": (0.0, 1.0)},
        "overload_target": 0.07,
    }
    entry = registry.entry_of("new", TypeAdapter(PolicyConfig).validate_python(learned))
    written = registry.write_entry(tmp_path, entry)
    shipped, strict, new = entrants(["actor", "actor:overload_target=0.05", f"mine={written}"])
    refusals = [e.policy.overload_target for e in (shipped, strict, new)]
    assert refusals == [0.0, 0.05, 0.07]  # early refusal as asked for
    assert (new.label, new.policy.weights) == ("mine", {"slow": {"one": 0.1}})
    assert not new.policy.envelope  # the compiled loop runs it
    assert shipped.policy.weights is not None
    for bad in ("nonsense", "best_fit:typo=1", str(tmp_path / "absent.yaml")):
        with pytest.raises(ConfigError):
            entrants([bad])


def test_without_ray_it_says_so():
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        unit = Unit(scenario=small(), entrants=())
        with pytest.raises(ConfigError, match="pip install ray"):
            list(results([unit], data=None, profiles=shipped(), ray="auto"))
    else:
        pytest.skip("ray is installed")


@pytest.mark.slow
def test_processes_share_the_work_and_change_nothing(tmp_path):
    """Two gateways, so that the spawned processes take the live core too."""
    words = ("round_robin", "least_requests")
    alone = execute(plan(*words, gateways=2), tmp_path / "a")
    shared = execute(plan(*words, gateways=2), tmp_path / "b", jobs=2)

    def key(cell):
        return cell.policy, cell.load, cell.seed

    for one, two in zip(sorted(alone.cells, key=key), sorted(shared.cells, key=key), strict=True):
        assert key(one) == key(two)
        assert one.report.by_work == two.report.by_work


@pytest.mark.slow
def test_a_failing_process_is_reported():
    bad = Unit(scenario=small(gateways=2, fleet=({"profile": "b300"},)), entrants=(), rate=1.0)
    with pytest.raises(RuntimeError, match="b300"):
        list(results([bad, bad], data=None, profiles=shipped(), jobs=2))


def test_the_command_writes_table_and_report(tmp_path, capsys):
    import yaml

    from sluice.cli import main

    scenario = tmp_path / "small.yaml"
    scenario.write_text(yaml.safe_dump(small(gateways=2).model_dump(mode="json")))
    out = tmp_path / "out"
    words = ["compare", str(scenario), "--policies", "round_robin", "least_requests", "lmetric",
             "--seeds", "2", "--loads", "0.5", "1", "1.6", "--live-requests", "200",
             "--out", str(out), "--markdown", str(tmp_path / "t.md"), "--json"]  # fmt: skip
    assert main(words) == 0
    table = json.loads(capsys.readouterr().out)
    assert table == json.loads((out / "table.json").read_text())
    assert {row["policy"] for row in table["blocks"][0]["rows"]} == {
        "round_robin", "least_requests", "lmetric"}  # fmt: skip
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1
    assert not any(word in page for word in ("<link", "<script", "src=", 'href="http'))
    assert "| lmetric" in (tmp_path / "t.md").read_text()
