"""The quality job end to end on answers whose law is known."""

import json

import numpy as np
import pytest

pytest.importorskip("lightgbm")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402 - optional dependency

from predictors.features import PromptFacts, encode  # noqa: E402
from predictors.quality import QualityModel  # noqa: E402
from training import fit_quality  # noqa: E402
from training.fit_quality import auc, floor_run  # noqa: E402

WORDS = ["river", "stone", "cloud", "paper", "metal", "garden", "window", "bridge", "engine"]
EASY, HARD = "Is a {} wet? Yes or no", "Prove a theorem about the {} matrix integral"
MODELS = {"tiny-1b": (0.75, 0.1), "middle-7b": (0.9, 0.4), "large-70b": (0.95, 0.8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """LLMRouter's layout; the chance to be right depends on the kind of prompt and the model."""
    base = tmp_path_factory.mktemp("data")
    home = base / "llmrouter_scores"
    home.mkdir()
    rng = np.random.default_rng(0)
    texts = [
        (t.format(f"{a} {b} {c}"), hard)
        for hard, t in enumerate((EASY, HARD))
        for a in WORDS
        for b in WORDS
        for c in WORDS
    ]
    ids = [f"p{i}" for i in range(len(texts))]
    prompts = {"prompt_id": ids, "text": [t for t, _ in texts], "task": ["one"] * len(ids)}
    pq.write_table(pa.table(prompts), home / "prompts.parquet")
    rows = [
        (ids[i], model, float(rng.random() < chance[hard]))
        for i, (_, hard) in enumerate(texts)
        for model, chance in MODELS.items()
    ]
    columns = dict(zip(("prompt_id", "model", "score"), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table({k: list(v) for k, v in columns.items()}), home / "scores.parquet")
    price = "model,usd_per_mtok_input,usd_per_mtok_output,size\n"
    price += "tiny-1b,0.1,0.1,1B\nmiddle-7b,0.2,0.2,7B\nlarge-70b,0.9,0.9,70B\n"
    (home / "prices.csv").write_text(price)
    return base


@pytest.mark.slow
def test_job_learns_which_prompts_are_hard(folder, tmp_path, capsys):
    """Better than base rates, calibrated, cheaper than the best single model at 85 % of it."""
    out = tmp_path / "quality.npz"
    where = ["--data", str(folder), "--out", str(out), "--report", str(tmp_path / "report")]
    assert fit_quality.main([*where, "--sets", "llmrouter"]) == 0
    entry = json.loads(capsys.readouterr().out)["sets"]["llmrouter"]
    assert entry["skill"]["ours"] > 0.2
    assert entry["auc_within_model"]["ours"] > 0.65
    for predicted, found, count in entry["reliability"]:
        if count > 100:
            assert predicted == pytest.approx(found, abs=0.1)
    floor = min(entry["routing"]["floors"].values(), key=lambda f: f["ours"]["floor"])["ours"]
    assert floor["quality"] >= floor["floor"] - 0.03
    assert floor["cost"] < 0.9 * entry["routing"]["best_single"]["cost"]
    model = QualityModel.load(out)
    names, priors = ["tiny-1b", "large-70b"], [0.5, 0.85]
    easy, hard = (
        model.predict(encode(PromptFacts(text=t.format("lamp"))), names, priors)
        for t in (EASY, HARD)
    )
    assert easy[0] - easy[1] > hard[0] - hard[1]


def test_auc_by_hand():
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])) == 0.75
    assert np.isnan(auc(np.array([0.1]), np.array([1.0])))


def test_floor_run_buys_no_more_quality_than_asked():
    """With a perfect prediction the queue holds the floor near its cheapest price."""
    rng = np.random.default_rng(0)
    chance = np.tile([0.6, 0.9], (4000, 1))
    truth = (rng.random(chance.shape) < chance).astype(float)
    cost = np.tile([1.0, 5.0], (4000, 1))
    result = floor_run(truth, chance, cost, 0.75)
    assert result["quality"] == pytest.approx(0.75, abs=0.03)
    assert result["cost"] == pytest.approx(3.0, abs=0.4)
    assert result["windows_held"] > 0.7
