"""The learned latency: what it predicts, how it is watched, and that nothing hostile passes."""

import math
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from domain.columns import LOAD_GRID, estimate_columns
from domain.outcome import Cause, Outcome, Prediction, Usage, UsageSource
from predictors import latency
from predictors.artifact import Artifact, ArtifactError, save
from predictors.latency import BASE_TTFT, COUNT, ROOF_TPOT, ROOF_TTFT, USED, WIDTH
from predictors.latency_gbdt import MIDDLE, LatencyGbdt
from predictors.latency_layer import LatencyLayer, p90
from predictors.learned import LearnedEstimator, load_parts
from tests.fakes.latency_model import as_bytes, toy
from tests.fakes.shells import request
from tests.fakes.states import random_spec, random_state


def bound(state, model=None, **options):
    estimator = LearnedEstimator(latency=model)
    estimator.latency = LatencyLayer(model, **options)
    m = len(state.fleet.usable)
    estimator.bind(random_spec(np.random.default_rng(0), m), state.routes)
    return estimator


def fill(estimator, state):
    out = estimate_columns(*state.mask.shape)
    out.cached[:] = state.estimates.cached
    people = [request(f"q{i}") for i in range(len(state.requests.prompt))]
    estimator.fill(state.requests, state.fleet, state.routes, state.mask, state.now, out, people)
    return out


def choices(state):
    return [(int(i), int(c)) for i, c in np.argwhere(state.mask)]


def outcome(prediction, ttft, tpot, replica=0, tokens=100.0, **more):
    """A finished, streamed request whose first token took `ttft` s and the others `tpot` s each."""
    first = 1.0 + ttft
    return Outcome(
        request=request("q"),
        cause=Cause.FINISHED,
        arrived=1.0,
        sent=1.0,
        first_token=first,
        last_token=first + tpot * (tokens - 1),
        ended=first + tpot * (tokens - 1),
        usage=Usage(prompt=100.0, completion=tokens, source=UsageSource.ENGINE),
        prediction=prediction,
        **({"route": replica, "replica": replica, "met": True} | more),
    )


def prediction_of(estimator, out, i, c):
    return Prediction(
        ttft=tuple(out.ttft[i, c].tolist()),
        tpot=tuple(out.tpot[i, c].tolist()),
        p_raw=float(out.p_raw[i, c]),
        basis=estimator.basis(i, c),
    )


def test_the_trees_correct_the_base_and_keep_the_rooflines_word():
    """TTFT = base * e^mu at the middle, rising with u; the row remembers what the roofline said."""
    state = random_state(2)
    roof = fill(bound(state), state)
    estimator = bound(state, LatencyGbdt(toy(ttft=0.5, tpot=-0.25)), shortlist=64)
    out = fill(estimator, state)
    for i, c in choices(state):
        row = estimator.basis(i, c)
        assert len(row) == WIDTH
        assert row[USED] == 1.0
        assert row[ROOF_TTFT] == pytest.approx(roof.ttft[i, c, MIDDLE])
        assert row[ROOF_TPOT] == pytest.approx(roof.tpot[i, c, MIDDLE])
        assert out.ttft[i, c, MIDDLE] == pytest.approx(row[BASE_TTFT] * math.exp(0.5))
        assert out.tpot[i, c, MIDDLE] == pytest.approx(row[ROOF_TPOT] * math.exp(-0.25))
        assert np.all(np.diff(out.ttft[i, c]) > 0)
        assert np.all(np.diff(out.tpot[i, c]) > 0)


@pytest.mark.parametrize("coupling", [1.0, 0.0, 0.3])
def test_the_joint_probability_counts_the_grid(coupling):
    """The share of the grid on which TTFT, TPOT and E2E hold: with one u for both times, with one
    each, or between.
    """
    state = random_state(4)
    estimator = bound(state, LatencyGbdt(toy(spread=0.6, coupling=coupling)), shortlist=64)
    out = fill(estimator, state)
    requests, grid = state.requests, range(len(LOAD_GRID))
    for i, c in choices(state):
        waited = state.now - requests.arrived[i]

        def met(u, v, length, i=i, c=c, waited=waited):
            began = waited + out.ttft[i, c, u]
            pace = out.tpot[i, c, v]
            whole = began + max(length - 1.0, 0.0) * pace
            return (
                began <= requests.ttft[i] and pace <= requests.tpot[i] and whole <= requests.e2e[i]
            )

        lengths = requests.length_q[i]
        same = np.mean([met(u, u, length) for u in grid for length in lengths])
        free = np.mean([met(u, v, length) for u in grid for v in grid for length in lengths])
        assert out.p_raw[i, c] == pytest.approx(coupling * same + (1.0 - coupling) * free)


def test_only_the_shortlist_is_refined():
    """The routes that the roofline likes best are refined; the rest keeps the roofline's word."""
    state = random_state(3)
    roof = fill(bound(state), state)
    out = fill(bound(state, LatencyGbdt(toy(ttft=1.0)), shortlist=1), state)
    for i in range(len(state.requests.prompt)):
        masked = np.flatnonzero(state.mask[i])
        changed = [c for c in masked if out.tpot[i, c, -1] != roof.tpot[i, c, -1]]
        assert len(changed) == min(len(masked), 1)
        for c in changed:
            assert roof.p_slo[i, c] == roof.p_slo[i, masked].max()


def test_looking_changes_nothing():
    state = random_state(5)
    estimator = bound(state, LatencyGbdt(toy(0.3)))
    before = [a.copy() for a in state.arrays()]
    one, two = fill(estimator, state), fill(estimator, state)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(before, state.arrays(), strict=True))


def test_strange_rows_keep_the_roofline():
    """Far outside what the fit saw the trees are not asked."""
    state = random_state(6)
    narrow = toy(1.0, range_low=np.full(COUNT, 100.0), range_high=np.full(COUNT, 101.0))
    estimator = bound(state, LatencyGbdt(narrow))
    out, roof = fill(estimator, state), fill(bound(state), state)
    assert np.array_equal(out.ttft, roof.ttft)
    assert np.array_equal(out.p_slo, roof.p_slo)
    assert {estimator.basis(i, c)[USED] for i, c in choices(state)} == {0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30, 1e300])
@pytest.mark.parametrize(
    "column", ["context", "foreign_context", "backlog_tokens", "kv_used", "age", "tokens"]
)
def test_absurd_columns_give_numbers(column, value):
    """Whatever a metric says, every row is finite and every prediction a number above 0."""
    state = random_state(7)
    estimator = bound(state, LatencyGbdt(toy()), shortlist=64)
    getattr(state.fleet, column)[:] = value
    with np.errstate(all="ignore"):
        out = fill(estimator, state)
        bases = {(i, c): estimator.basis(i, c) for i, c in choices(state)}
    for (i, c), row in bases.items():
        assert all(math.isfinite(x) for x in row)
        if row[USED]:
            assert np.all(out.ttft[i, c] > 0)


def test_an_alarm_gives_the_class_back_to_the_roofline_and_ends_when_the_trees_are_right():
    """Page and Hinkley on the error beyond the roofline's, per class; recovery is seen because the
    trees are asked about outcomes all the while.
    """
    state = random_state(8)
    estimator = bound(state, LatencyGbdt(toy(ttft=1.5)), shortlist=64)
    i, c = choices(state)[0]
    layer = estimator.latency
    replica = int(state.routes.decode[c])
    out = fill(estimator, state)
    seen = prediction_of(estimator, out, i, c)
    roof_ttft, roof_tpot = seen.basis[ROOF_TTFT], seen.basis[ROOF_TPOT]
    for _ in range(30):
        layer.learn(outcome(seen, roof_ttft, roof_tpot, replica), replica)
    assert layer.alarmed
    after = fill(estimator, state)
    assert estimator.basis(i, c)[USED] == 0.0
    plain = bound(state)
    plain._base._scales.rows[:] = estimator._base._scales.rows
    assert after.ttft[i, c] == pytest.approx(fill(plain, state).ttft[i, c])
    right = seen.basis[BASE_TTFT] * math.exp(1.5)
    for _ in range(200):
        seen = prediction_of(estimator, fill(estimator, state), i, c)
        layer.learn(outcome(seen, right, roof_tpot, replica), replica)
    assert layer.alarmed == ()
    fill(estimator, state)
    assert estimator.basis(i, c)[USED] == 1.0


def test_the_bound_stretches_until_it_covers():
    """A spread that is three times too small is found out: nine in ten fall below P90."""
    rng = np.random.default_rng(0)
    state = random_state(9)
    estimator = bound(state, LatencyGbdt(toy(spread=0.1)), shortlist=64)
    estimator.latency._pace.learn_ttft = lambda *_: None
    i, c = choices(state)[0]
    replica = int(state.routes.decode[c])
    below = []
    for _ in range(1500):
        seen = prediction_of(estimator, fill(estimator, state), i, c)
        base = seen.basis[BASE_TTFT]
        actual = base * math.exp(0.25 * rng.standard_normal())
        below.append(actual <= p90(seen.ttft))
        estimator.latency.learn(outcome(seen, actual, seen.basis[ROOF_TPOT], replica), replica)
    assert np.mean(below[300:]) == pytest.approx(0.9, abs=0.03)


def test_a_token_tells_the_phase_of_the_running_step():
    """Just after a token the whole step is still to be waited for, a little later less of it."""
    state = random_state(4)
    estimator = bound(state, LatencyGbdt(toy()), shortlist=64)
    state.fleet.backlog_tokens[:] = state.fleet.foreign_backlog[:] = 0.0
    state.fleet.n_streams[:] = 0
    state.fleet.running[:] = 3.0
    i, c = choices(state)[0]
    replica = int(state.routes.prefill[c])
    waits = []
    for ago in (1e-6, 1e-3):
        estimator.bind(random_spec(np.random.default_rng(0), len(state.fleet.usable)), state.routes)
        estimator.latency._pace.rows[latency.BOUNDARY] = -60.0
        estimator.stepped((replica, replica), (state.now - ago, state.now - 30.0))
        waits.append(prediction_of(estimator, fill(estimator, state), i, c).ttft[MIDDLE])
    assert waits[0] - waits[1] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("ttft", [0.0, -1.0, 1e-300, 1e300, math.nan, math.inf])
def test_absurd_outcomes_teach_nothing_absurd(ttft):
    state = random_state(10)
    estimator = bound(state, LatencyGbdt(toy()))
    i, c = choices(state)[0]
    replica = int(state.routes.decode[c])
    seen = prediction_of(estimator, fill(estimator, state), i, c)
    for _ in range(20):
        estimator.latency.learn(outcome(seen, ttft, ttft, replica), replica)
        short = seen._replace(basis=seen.basis[:-1])
        estimator.latency.learn(outcome(short, ttft, ttft, replica), replica)
    assert np.all(np.isfinite(estimator.latency._pace.rows[latency.COMPUTE]))
    out = fill(estimator, state)
    assert np.all(np.isfinite(out.ttft[state.mask]))


def test_replicas_that_stay_keep_what_was_learned():
    state = random_state(11)
    estimator = bound(state, LatencyGbdt(toy()))
    spec = random_spec(np.random.default_rng(0), len(state.fleet.usable))
    estimator.latency._pace.rows[latency.COMPUTE] = np.arange(len(spec.replicas)) + 1.0
    kept = spec.replicas[1:]
    estimator.latency.bind(replace(spec, replicas=kept))
    expected = np.arange(len(spec.replicas))[1:] + 1.0
    assert np.array_equal(estimator.latency._pace.rows[latency.COMPUTE], expected)


# ---- another model


def test_a_swap_takes_the_model_and_nothing_else():
    layer = LatencyLayer(LatencyGbdt(toy()))
    first = layer.version
    data = as_bytes(toy(ttft=0.7))
    version = LatencyGbdt.loads(data).version
    layer.swap("latency_gbdt-other", data)
    assert (layer.version, layer.refused) == (first, 1)
    layer.swap(version, data[: len(data) // 2])
    assert (layer.version, layer.refused) == (first, 2)
    layer.swap(version, data)
    assert layer.version == version


def test_a_prepared_model_is_taken_without_reading_it_again():
    layer = LatencyLayer()
    data = as_bytes(toy(ttft=0.7))
    version = layer.prepare(data)
    layer.swap(version, b"")
    assert layer.version == version


# ---- hostile artifacts


BROKEN = {
    "a loop": {"forest_feature": np.array([0, -1, -1, -1], np.int32)},
    "a feature out of bounds": {"forest_feature": np.array([COUNT, -1, -1, -1], np.int32)},
    "a root out of bounds": {"forest_root": np.array([0, 1, 2, 99], np.int32)},
    "a negative root": {"forest_root": np.array([0, 1, 2, -1], np.int32)},
    "a value that is no number": {"forest_threshold": np.array([math.nan, 0.0, 0.0, 0.0])},
    "columns of other lengths": {"forest_left": np.zeros(3, np.int32)},
    "no forest": {"forest_root": np.zeros(0, np.int32)},
    "heads beyond the roots": {"heads": np.array([0, 1, 2, 3, 9])},
    "heads that fall": {"heads": np.array([0, 3, 2, 3, 4])},
    "heads of another shape": {"heads": np.array([0, 4])},
    "quantiles that are no numbers": {"z": np.full((2, len(LOAD_GRID)), math.nan)},
    "quantiles that fall": {"z": -np.tile(np.linspace(-1, 1, len(LOAD_GRID)), (2, 1))},
    "quantiles of another shape": {"z": np.zeros((2, 3))},
    "ranges of another shape": {"range_low": np.zeros(COUNT + 1)},
    "ranges that are no numbers": {"range_high": np.full(COUNT, math.nan)},
    "a coupling above one": {"coupling": np.array([1.5])},
    "a coupling that is no number": {"coupling": np.array([math.nan])},
    "text for numbers": {"heads": np.array(["a"] * 5)},
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_artifact_that_does_not_fit_together_is_refused(what):
    with pytest.raises(ArtifactError):
        LatencyGbdt(toy(**BROKEN[what]))


def test_missing_arrays_are_named():
    artifact = toy()
    for name in artifact.arrays:
        less = {k: v for k, v in artifact.arrays.items() if k != name}
        with pytest.raises(ArtifactError):
            LatencyGbdt(Artifact(kind=artifact.kind, arrays=less, schema=artifact.schema))


def test_files_that_are_no_artifact_leave_the_roofline(tmp_path, caplog):
    """Missing, empty, text, cut, of another schema or kind: said in the log, and served without."""
    good = as_bytes(toy())
    bad = {
        "empty.npz": b"",
        "text.npz": b"not a zip",
        "cut.npz": good[:-40],
        "flipped.npz": good[:200] + bytes([good[200] ^ 0xFF]) + good[201:],
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    older = toy()
    save(replace(older, schema="older"), tmp_path / "schema.npz")
    save(replace(older, kind="length_gbdt"), tmp_path / "kind.npz")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("artifact.json", "[" * 100)
    for name in (*bad, "schema.npz", "kind.npz", "other.npz", "missing.npz"):
        caplog.clear()
        assert load_parts(None, None, tmp_path / name) == (None, None, None), name
        assert "roofline serves" in caplog.text
