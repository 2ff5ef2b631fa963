"""The artifacts that ship load, say what may be shipped, and are small."""

import subprocess
import sys

import numpy as np

from domain.length import LengthDistribution
from predictors.artifact import load
from predictors.config import LearnedConfig
from predictors.factory import build_estimator
from predictors.features import SCHEMA_HASH, PromptFacts, encode
from predictors.learned import PACKAGED
from predictors.length_gbdt import KIND, LengthGbdt
from predictors.quality import QualityModel

OWN = LengthDistribution.lognormal(250.0, 0.9)


def test_packaged_lengths_tell_long_tasks_from_short_ones():
    """The order that anybody would expect, whatever the model's own level."""
    model = LengthGbdt.load(PACKAGED / "length.npz")
    texts = (
        "What is the capital of France?",
        "Explain the causes of the first world war with examples",
        "Write a complete Python web server with a database and tests",
    )
    medians = [
        model.predict(encode(PromptFacts(text=t)), "llama-8b", OWN).quantile(0.5) for t in texts
    ]
    assert medians[0] < medians[1] < medians[2]


def test_packaged_artifacts_may_be_shipped():
    """Nothing of AlpacaEval (non-commercial) went into them; all three fit into 5 MB."""
    card = load(PACKAGED / "length.npz", kind=KIND, schema=SCHEMA_HASH).card
    assert card["shippable"] is True
    assert "alpaca_eval" not in card["sources"]
    assert sum(path.stat().st_size for path in PACKAGED.glob("*.npz")) < 5_000_000


def test_packaged_quality_finds_prompts_harder_for_the_small_model():
    """A hard question costs probability; the numbers stay probabilities."""
    model = QualityModel.load(PACKAGED / "quality.npz")
    names, priors = ["qwen2.5-7b-instruct", "unknown-70b"], [0.6, 0.8]
    easy = model.predict(encode(PromptFacts(text="What is 2 + 3?")), names, priors)
    hard = model.predict(
        encode(PromptFacts(text="Prove that every finite simple group of odd order is cyclic")),
        names,
        priors,
    )
    assert np.all((np.array(easy + hard) >= 0) & (np.array(easy + hard) <= 1))
    assert easy != hard


def test_learned_is_served_out_of_the_box():
    estimator = build_estimator(LearnedConfig())
    assert "length_gbdt" in estimator.version


def test_serving_what_ships_brings_no_training_library():
    """One forecast in a fresh process: the fit's libraries stay out of the gateway's."""
    code = (
        "import sys; from predictors.config import LearnedConfig;"
        "from predictors.factory import build_estimator;"
        "from domain.request import InferenceRequest;"
        "from predictors.features import PromptFacts, encode;"
        "e = build_estimator(LearnedConfig());"
        "f = tuple(encode(PromptFacts(text='Write a poem')).tolist());"
        "e.length(InferenceRequest(id='a', tenant='t', model='m', prompt_tokens=9.0, features=f));"
        "assert 'length_gbdt' in e.version, e.version;"
        "print(sorted({'torch', 'lightgbm', 'sklearn'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "[]"
