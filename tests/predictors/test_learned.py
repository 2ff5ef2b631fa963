import numpy as np
import pytest

from domain.columns import estimate_columns
from domain.length import LengthDistribution
from domain.outcome import Cause, Outcome, Usage, UsageSource
from predictors.config import LearnedConfig
from predictors.conformal import corrected
from predictors.factory import build_estimator
from predictors.features import PromptFacts, encode
from predictors.learned import LearnedEstimator
from predictors.length_gbdt import STRETCHES, LengthGbdt
from tests.fakes.length_model import toy
from tests.fakes.shells import request
from tests.fakes.states import random_spec, random_state


def ask(text, id_="a", **more):
    features = tuple(encode(PromptFacts(text=text)).tolist())
    return request(id_, features=features, max_tokens=None, **more)


def ended(asked, tokens, cause=Cause.FINISHED):
    usage = Usage(completion=tokens, source=UsageSource.ENGINE)
    return Outcome(request=asked, cause=cause, arrived=0.0, ended=1.0, usage=usage)


def serve(estimator, text, lengths, start=0):
    """Ask and answer in turn; the P90 that each answer was promised under."""
    bounds = []
    for i, tokens in enumerate(lengths):
        asked = ask(text, f"r{start + i}")
        bounds.append(estimator.length(asked).quantile(0.9))
        estimator.learn(ended(asked, float(tokens)))
    return np.array(bounds)


def test_prompts_count_and_missing_features_do_not():
    """The prompt moves the forecast; a request without features gets the running lengths."""
    estimator = LearnedEstimator(LengthGbdt(toy()))
    short, long = (estimator.length(ask(text)).mean for text in ("short", "long"))
    plain = estimator.length(request("p", max_tokens=None)).mean
    assert short < plain < long


def test_p90_covers_although_the_model_is_wrong():
    """The prompt says "short", the answers are as long as ever: the bound finds out."""
    rng = np.random.default_rng(0)
    lengths = np.ceil(200 * np.exp(0.5 * rng.normal(size=1500)))
    bounds = serve(LearnedEstimator(LengthGbdt(toy())), "short", lengths)
    assert (lengths <= bounds)[300:].mean() == pytest.approx(0.9, abs=0.02)


class Breakable(LengthGbdt):
    """A model whose every forecast can be made five times too quick."""

    broken = False

    def factors(self, features, scores, model, own):
        return np.full(STRETCHES, 5.0 if self.broken else 1.0)


def test_forecasts_worse_than_the_running_lengths_are_switched_off_and_on_again():
    """The alarm falls back to the running distribution, and recovers once the forecast is right."""
    rng = np.random.default_rng(1)
    model = Breakable(toy())
    estimator = LearnedEstimator(model)
    lengths = np.ceil(200 * np.exp(0.8 * rng.normal(size=400)))
    serve(estimator, "neutral", lengths)
    assert estimator.alarmed == ()
    off = []
    for i in range(400):
        model.broken = i < 60
        serve(estimator, "neutral", lengths[i : i + 1], start=1000 + i)
        off.append(estimator.alarmed)
    assert ("m",) in off[:60]
    assert off[-1] == ()


def test_cancelled_answers_do_not_pull_the_forecast_down():
    """A client that leaves early says only that the answer was at least this long."""
    estimator = LearnedEstimator(LengthGbdt(toy()))
    before = estimator.length(ask("say so")).quantile(0.9)
    for i in range(50):
        asked = ask("say so", f"c{i}")
        estimator.length(asked)
        estimator.learn(ended(asked, 3.0, Cause.CLIENT_GONE))
    assert estimator.length(ask("say so")).quantile(0.9) == pytest.approx(before)


def test_the_median_stays_where_only_the_bound_was_off():
    """Correcting the P90 moves the upper half."""
    forecast = LengthDistribution.lognormal(200.0, 0.8)
    for level in (0.8, 0.97):
        got = corrected(forecast, level)
        assert got.quantile(0.5) == pytest.approx(forecast.quantile(0.5), rel=0.03)
        assert got.quantile(0.25) == pytest.approx(forecast.quantile(0.25), rel=0.001)


def test_a_fit_that_is_wrong_is_not_believed_for_long():
    """Nor is it asked to leave: its weight falls, and the forecast is the running one's."""
    rng = np.random.default_rng(3)
    estimator, base = LearnedEstimator(LengthGbdt(toy())), LearnedEstimator()
    first = estimator.length(ask("short")).mean
    lengths = np.ceil(200 * np.exp(0.5 * rng.normal(size=120)))
    serve(estimator, "short", lengths)
    serve(base, "short", lengths)
    assert first < base.length(ask("short")).mean
    assert estimator.length(ask("short")).quantile(0.5) == pytest.approx(
        base.length(ask("short")).quantile(0.5), rel=0.1
    )


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.97, 0.9995])
def test_corrected_moves_the_p90_to_the_level(level):
    """The new P90 is the old quantile at that level, as far as the clamp allows."""
    forecast = LengthDistribution.lognormal(200.0, 0.8)
    got = corrected(forecast, level).quantile(0.9)
    assert got == pytest.approx(forecast.quantile(level), rel=0.02)


def test_a_replayed_history_gives_the_same_forecasts():
    rng = np.random.default_rng(2)
    lengths = np.ceil(150 * np.exp(rng.normal(size=200)))
    runs = [serve(LearnedEstimator(LengthGbdt(toy())), "long", lengths) for _ in range(2)]
    assert runs[0].tolist() == runs[1].tolist()


def test_an_unusable_artifact_leaves_the_baseline(tmp_path, caplog):
    """Missing or damaged files are logged, and running lengths serve."""
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 nonsense")
    for path in (broken, tmp_path / "none.npz"):
        estimator = build_estimator(LearnedConfig(length=path, quality=path))
        assert estimator.version == LearnedEstimator().version
        assert estimator.length(ask("long")).mean > 0
    assert "running lengths serve" in caplog.text


def test_memory_of_forecasts_is_bounded(monkeypatch):
    monkeypatch.setattr("predictors.learned.REMEMBERED", 10)
    estimator = LearnedEstimator(LengthGbdt(toy()))
    for i in range(50):
        estimator.length(ask("long", f"r{i}"))
    assert len(estimator._forecasts) <= 10


class Judge:
    """Counts how often it is asked; an answer is as good as the prior says."""

    version = "judge"

    def __init__(self):
        self.asked = []

    def predict(self, features, models, priors):
        self.asked.append(tuple(models))
        return list(priors)


def test_quality_is_asked_once_for_a_request_and_follows_feedback():
    """Looked at again while it is held, or with many replicas: one question about each variant."""
    state = random_state(3)
    spec = random_spec(np.random.default_rng(0), len(state.fleet.usable))
    estimator = LearnedEstimator(quality=Judge())
    estimator.bind(spec, state.routes)
    judge = estimator._quality_model
    people = [request(f"q{i}") for i in range(len(state.requests.prompt))]

    def seen():
        out = estimate_columns(*state.mask.shape)
        estimator.fill(
            state.requests, state.fleet, state.routes, state.mask, state.now, out, people
        )
        return out.quality

    names = tuple(v.name for v in spec.variants)
    for _ in range(3):
        quality = seen()
    assert judge.asked == [names] * len(people)
    for i, c in np.argwhere(state.mask):
        variant = spec.variants[state.routes.variant[c]]
        assert quality[i, c] == pytest.approx(variant.quality)
    estimator.feedback(names[0], 0.0)
    worse = seen()
    i, c = np.argwhere(state.mask & (state.routes.variant == 0))[0]
    assert worse[i, c] < quality[i, c]
    assert np.array_equal(worse[~state.mask], quality[~state.mask])
