import json

import pytest
import yaml

from backends.sim.profiles import read_profiles
from sluice.cli import main
from training.calibrate import Constants, Steps, step_seconds

HEAD = (
    "gpu,engine,model,weight_dtype,tp,phase,batch,new_tokens_per_seq,cached_tokens_per_seq,"
    "latency_ms"
)


@pytest.fixture
def table(tmp_path):
    """A step table of known constants, as CSV."""
    import numpy as np

    lines = [HEAD]
    truth = Constants(0.003, 0.012, 2e-5, 6e-8, 5e-5, 1.5e-9, 0.0, 1.0)
    shapes = [("decode", b, 1, c) for b in (1, 4, 16, 64, 256) for c in (128, 1024, 4096)]
    shapes += [("prefill", b, n, 0) for b in (1, 4) for n in (64, 256, 1024, 4096)]
    for phase, b, n, c in shapes:
        d = phase == "decode"
        row = (b, b * c, 0, 0, 1) if d else (0, 0, b * n, b * n * n / 2, 1)
        steps = Steps(*(np.array([float(x)]) for x in row))
        ms = 1e3 * step_seconds(truth, steps)[0]
        lines.append(f"h100,vllm,m-8b,bf16,1,{phase},{b},{n},{c},{ms:.6f}")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines))
    return path


def test_a_table_is_fitted_and_written(table, tmp_path, capsys):
    """Report on stdout, profiles in a file that scenarios can name."""
    out = tmp_path / "mine.yaml"
    words = ["calibrate", "steps", str(table), "--check", "--out", str(out), "--licence", "ours"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "h100-vllm-m-8b-bf16-tp1" in told
    assert "100.0 % of 1 families" in told
    (profile,) = read_profiles(out).values()
    assert profile.weights + profile.overhead == pytest.approx(0.015, rel=0.05)
    assert yaml.safe_load(out.read_text())["licence"] == "ours"


def test_the_report_as_json(table, capsys):
    """Machines get rows and figures."""
    assert main(["calibrate", "steps", str(table), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["figures"]["within_bar"] == 1.0
    assert report["rows"][0]["family"] == "h100-vllm-m-8b-bf16-tp1"


def test_a_missed_bar_is_exit_code_1(table, capsys):
    """Steps that no formula explains: --check says so, without it the job is done."""
    import numpy as np

    rng = np.random.default_rng(0)
    head, *rows = table.read_text().splitlines()
    wild = [f"{r.rsplit(',', 1)[0]},{rng.lognormal(2, 2):.3f}" for r in rows]
    table.write_text("\n".join([head, *wild]))
    assert main(["calibrate", "steps", str(table), "--check"]) == 1
    assert "MISSED" in capsys.readouterr().out
    assert main(["calibrate", "steps", str(table)]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["steps", "none.csv"], "none.csv: no such file"),
        (["steps", "--share", "2"], "--share must lie between 0 and 1, not 2"),
        (["log"], "needs a decision log: FILE..."),
        (["log", "none.jsonl"], "none.jsonl: No such file"),
        (["e2e", "--data", "nowhere"], "no data set at nowhere"),
        (["e2e", "a", "b"], "takes one FILE, not 2"),
        (["runs", "a"], "runs takes no FILE"),
        (["e2e", "--folds", "1"], "--folds must be 0 or at least 2, not 1"),
        (["steps", "--out", "no/such/file.yaml"], "no such folder"),
    ],
)
def test_bad_input_is_exit_code_2(words, says, capsys):
    """One line that says what is wrong."""
    assert main(["calibrate", *words]) == 2
    assert says in capsys.readouterr().err
