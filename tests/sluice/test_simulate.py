"""`sluice simulate` on a scenario that needs no data."""

import json

import pytest

from sluice.cli import main

SCENARIO = """
name: small
fleet: [{profile: h100-bf16-14b, count: 2}]
classes: {only: {ttft: 1.0, tpot: 0.1}}
requests: 120
warmup: 10
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return str(path)


def test_a_report_as_json(scenario, capsys):
    code = main(["simulate", scenario, "--policy", "least_requests", "--rate", "4", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["arrivals"] == 110
    assert report["attainment"] > 0.9


def test_a_report_for_people_and_options(scenario, capsys):
    argv = ["simulate", scenario, "--rate", "4", "--set", "shed_below=0.1", "--requests", "60"]
    assert main(argv) == 0
    assert "marginal at 4/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--policy", "linucd"], "linucd"),
        (["--set", "shed"], "NAME=VALUE"),
        (["--set", "nonsense=1"], "nonsense"),
        (["--rate", "0"], "above 0"),
    ],
)
def test_bad_input_is_named(scenario, capsys, extra, named):
    argv = ["simulate", scenario, "--rate", "4", *extra]
    assert main(argv) == 2
    assert named in capsys.readouterr().err
