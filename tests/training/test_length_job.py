"""The length job end to end on answers whose law is known."""

import json

import numpy as np
import pytest

pytest.importorskip("lightgbm")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402 - optional dependency

from domain.errors import ConfigError  # noqa: E402
from domain.length import EDGES, LengthDistribution  # noqa: E402
from predictors.features import SCHEMA_HASH, PromptFacts, encode  # noqa: E402
from predictors.length_gbdt import LengthGbdt  # noqa: E402
from training import fit_length  # noqa: E402
from training.dataset import (  # noqa: E402
    data_folder,
    hashed,
    load_lengths,
    read_decision_logs,
    split,
    split_by_time,
)
from training.hazard import own_distributions  # noqa: E402
from training.length_eval import crps, others, pinball  # noqa: E402

WORDS = ["river", "stone", "cloud", "paper", "metal", "garden", "window", "bridge", "engine"]
TASKS = {"Say briefly what a {} is": 20.0, "List 10 uses of a {}": 150.0}
TASKS |= {"Write a detailed essay about the {}": 700.0}
MODELS = {f"model-{i}-7b": 0.7 + 0.15 * i for i in range(6)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """AlpacaEval's layout with answers drawn from a log-normal of task times model."""
    base = tmp_path_factory.mktemp("data")
    home = base / "alpaca_eval_lengths"
    home.mkdir()
    rng = np.random.default_rng(0)
    texts = [(t.format(f"{a} {b}"), m) for t, m in TASKS.items() for a in WORDS for b in WORDS]
    ids = [f"p{i}" for i in range(len(texts))]
    pq.write_table(
        pa.table({"prompt_id": ids, "text": [t for t, _ in texts]}), home / "prompts.parquet"
    )
    rows = [
        (ids[i], model, int(np.ceil(median * scale * np.exp(0.3 * rng.normal()))))
        for i, (_, median) in enumerate(texts)
        for model, scale in MODELS.items()
    ]
    pq.write_table(
        pa.table(
            {
                "prompt_id": [r[0] for r in rows],
                "model": [r[1] for r in rows],
                "output_tokens": [r[2] for r in rows],
            }
        ),
        home / "responses.parquet",
    )
    return base


@pytest.mark.slow
def test_job_learns_what_prompts_ask_for(folder, tmp_path, capsys):
    """Held-out prompts: near the ceiling's rank, covered at 90 %, and the artifact loads."""
    out = tmp_path / "length.npz"
    where = ["--data", str(folder), "--out", str(out), "--report", str(tmp_path / "report")]
    code = fit_length.main([*where, "--sets", "alpaca_eval"])
    assert code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["shippable"] is False
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    entry = report["sets"]["alpaca_eval"]
    assert entry["tau_share"] > 0.85
    assert entry["crps_gain"] > 0.4
    assert entry["coverage"]["pooled"] == pytest.approx(0.9, abs=0.03)
    assert "<svg" in (tmp_path / "report" / "report.html").read_text()
    model = LengthGbdt.load(out)
    own = LengthDistribution.lognormal(150.0, 1.3)
    short, long = (
        model.predict(encode(PromptFacts(text=t)), "model-9-7b", own).quantile(0.5)
        for t in ("Say briefly what a lamp is", "Write a detailed essay about the lamp")
    )
    assert long > 2 * short


def test_splits_hold_prompts_and_models_out(folder):
    """No prompt on both sides, no unseen model in training, whatever the order of rows."""
    answers = load_lengths(folder, ["alpaca_eval"])
    parts = split(answers)
    train = set(answers.prompt[parts.train].tolist())
    assert not train & set(answers.prompt[parts.test | parts.unseen].tolist())
    seen = set(answers.model[parts.train].tolist())
    assert not seen & set(answers.model[parts.unseen].tolist())
    assert (
        hashed(np.array(["a", "b"]), "s").tolist()
        == hashed(np.array(["b", "a"]), "s")[::-1].tolist()
    )


def test_unknown_set_and_missing_folder(folder, tmp_path):
    with pytest.raises(ConfigError, match="known"):
        load_lengths(folder, ["alpaca_evil"])
    with pytest.raises(ConfigError, match="no data folder"):
        data_folder(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no file"):
        load_lengths(tmp_path, ["arena_hard"])


def test_decision_logs_are_read(tmp_path):
    """Cut and cancelled answers are censored; lines of another schema are left out."""
    vector = encode(PromptFacts(text="hello")).tolist()

    def line(at, cause="finished", tokens=10, limit=None, schema=SCHEMA_HASH):
        return json.dumps(
            {
                "id": f"r{at}",
                "at": at,
                "model": "m",
                "max_tokens": limit,
                "feature_schema": schema,
                "features": vector,
                "outcome": {"cause": cause, "completion_tokens": tokens},
            }
        )

    path = tmp_path / "log.jsonl"
    path.write_text(
        "\n".join(
            [
                line(1.0),
                line(2.0, cause="client_gone"),
                line(3.0, tokens=16, limit=16),
                line(4.0, schema="old"),
                line(5.0, tokens=0),
            ]
        )
    )
    answers = read_decision_logs([path])
    assert answers.at.tolist() == [1.0, 2.0, 3.0]
    assert answers.censored.tolist() == [False, True, True]
    parts = split_by_time(answers, 0.3)
    assert parts.test.tolist() == [False, False, True]


def test_own_distribution_is_kaplan_meier():
    """Cut answers leave the risk set and are no ends: the survival of a small sample by hand."""
    from training.dataset import Answers

    tokens = np.array([2.0, 4.0, 4.0, 6.0])
    answers = Answers(
        vectors=np.zeros((1, 1)),
        prompt_ids=np.array(["p"]),
        prompt=np.zeros(4, np.int64),
        dataset=np.array(["d"] * 4),
        model=np.array(["m"] * 4),
        tokens=tokens,
        censored=np.array([False, False, True, False]),
        score=np.full(4, np.nan),
        at=np.full(4, np.nan),
    )
    survival = own_distributions(answers, np.arange(4))["d", "m"].survival
    at = {int(e): s for e, s in zip(EDGES, survival, strict=True)}
    # the pool is the model itself, so shrinking changes nothing: 3/4, then 1 of 2.5 at risk
    assert at[2] == pytest.approx(0.75)
    assert at[4] == pytest.approx(0.75 * (1 - 1 / 2.5))


def test_crps_against_the_integral():
    """The closed form is the integral of (F - 1[x >= y])^2, with cut answers only up to the cut."""
    d = LengthDistribution.lognormal(80.0, 0.7)
    x = np.linspace(0.0, 20_000.0, 2_000_001)
    cdf = 1.0 - np.interp(x, EDGES, d.survival)
    for y in (5.0, 77.5, 1000.0):
        for cut in (False, True):
            inside = np.where(x < y, cdf, 0.0 if cut else 1.0 - cdf) ** 2
            got = crps(d.survival[None], np.array([y]), np.array([cut]))[0]
            assert got == pytest.approx(np.trapezoid(inside, x), rel=1e-3, abs=1e-6)


def test_pinball_and_others_by_hand():
    """Quantile loss of two levels; the ceiling of a row never contains the row itself."""
    loss = pinball(np.array([[1.0, 3.0]]), np.array([0.1, 0.9]), np.array([2.0]))
    assert loss[0] == pytest.approx((0.1 * 1.0 + 0.1 * 1.0) / 2)


def test_ceiling_leaves_the_row_out(folder):
    answers = load_lengths(folder, ["alpaca_eval"]).take(np.arange(12))
    z = np.arange(12.0)
    prompt = answers.prompt
    got = others(answers, np.arange(12), z)
    for i in range(12):
        rest = (prompt == prompt[i]) & (np.arange(12) != i)
        assert got[i] == pytest.approx(z[rest].mean())
