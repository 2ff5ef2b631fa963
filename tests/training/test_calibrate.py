import csv
import math

import numpy as np
import pytest

from backends.sim.profiles import load_profiles, write_profiles
from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey
from training.calibrate import (
    Constants,
    Family,
    Residual,
    Steps,
    _residual,
    as_profile,
    fit_family,
    fit_steps,
    left_out,
    step_seconds,
    take,
)
from training.calibrate_tables import KEY, SHAPE, device, read_table

TRUE = Constants(0.003, 0.012, 2e-5, 6e-8, 5e-5, 1.5e-9, 0.0, 1.0)
MIXTURE = TRUE._replace(weights=0.001, experts=0.03, expert_tokens=25.0)


def shapes():
    """Decode and prefill shapes as step tables have them: (decode, batch, new, cached)."""
    out = [(1, b, 1, c) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) for c in (128, 1024, 8192)]
    out += [(0, b, n, c) for b in (1, 4) for n in (32, 128, 512, 2048, 8192) for c in (0, 1024)]
    return np.array(out, float)


def steps_of(constants, noise=0.0, seed=0):
    """Those shapes, timed by the constants, with log-normal noise."""
    decode, batch, new, cached = shapes().T
    steps = Steps(
        batch=decode * batch,
        context=decode * batch * cached,
        prefill=(1 - decode) * batch * new,
        pairs=(1 - decode) * batch * new * (cached + new / 2),
        seconds=np.ones(len(batch)),
    )
    blur = np.exp(noise * np.random.default_rng(seed).standard_normal(len(batch)))
    return steps._replace(seconds=step_seconds(constants, steps) * blur)


def family(constants=TRUE, noise=0.02, **others):
    """A family of those steps."""
    return Family(
        name="card-engine-model",
        key=ProfileKey(gpu="h100", model="m"),
        steps=steps_of(constants, noise),
        shapes=shapes(),
        **others,
    )


def test_the_formula_is_that_of_a_profile():
    """A profile of the constants gives the same step, by hand."""
    steps = Steps(*(np.array([x]) for x in (4.0, 4000.0, 100.0, 5000.0, 1.0)))
    profile = Profile(**MIXTURE._asdict())
    memory, compute = 0.001 + 6e-8 * 4000, 5e-5 * 104 + 1.5e-9 * 5000
    by_hand = 0.003 + 2e-5 * 4 + 0.03 * 104 / 129 + max(memory, compute)
    assert step_seconds(profile, steps)[0] == pytest.approx(by_hand)
    assert step_seconds(MIXTURE, steps)[0] == pytest.approx(by_hand)


@pytest.mark.parametrize("truth", [TRUE, MIXTURE])
def test_slopes_are_those_of_the_residual(truth):
    """The derivatives handed to the solver are finite differences of what it minimises."""
    steps = steps_of(TRUE)
    logs = np.log(np.maximum(truth, 1e-6))
    _, slopes = _residual(logs, steps)
    for k in range(len(logs)):
        ahead = logs.copy()
        ahead[k] += 1e-6
        by_difference = (_residual(ahead, steps)[0] - _residual(logs, steps)[0]) / 1e-6
        assert slopes[:, k] == pytest.approx(by_difference, abs=1e-4)


@pytest.mark.parametrize("truth", [TRUE, MIXTURE])
def test_known_constants_come_back(truth):
    """Two per cent of noise: steps nobody saw within 3 %, slopes within a tenth."""
    found = fit_steps(steps_of(truth, noise=0.02, seed=1))
    clean = steps_of(truth)
    error = np.abs(step_seconds(found, clean) / clean.seconds - 1)
    assert np.median(error) < 0.02
    assert error.max() < 0.08
    for name in ("per_context", "per_token", "per_attention"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.15)


def test_outliers_do_not_turn_a_fit():
    """One step in twelve ten times too slow: the others are still met."""
    steps = steps_of(TRUE, noise=0.01)
    spoilt = steps.seconds.copy()
    spoilt[::12] *= 10
    found = fit_steps(steps._replace(seconds=spoilt))
    clean = steps_of(TRUE)
    assert np.median(np.abs(step_seconds(found, clean) / clean.seconds - 1)) < 0.04


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_of_noise_is_still_a_profile(seed):
    """Whatever the steps, no constant is negative and more work never takes less time."""
    steps = steps_of(TRUE)
    rng = np.random.default_rng(seed)
    found = fit_steps(steps._replace(seconds=rng.lognormal(-4, 1, len(steps.seconds))))
    assert min(found) >= 0
    Profile(**found._asdict())
    at = step_seconds(found, steps)
    for name in ("batch", "context", "prefill", "pairs"):
        more = steps._replace(**{name: 2 * getattr(steps, name) + 1})
        assert np.all(step_seconds(found, more) >= at)


def test_what_no_step_depends_on_is_none():
    """Prefill steps alone say nothing of sequences and contexts."""
    steps = steps_of(TRUE)
    found = fit_steps(take(steps, steps.prefill > 0), experts=False)
    assert found.per_sequence == found.per_context == found.experts == 0
    assert found.per_token > 0


def test_experts_need_their_term():
    """A mixture of experts is off by much without it."""
    steps = steps_of(MIXTURE)
    error = [
        np.quantile(
            np.abs(step_seconds(fit_steps(steps, experts=e), steps) / steps.seconds - 1), 0.9
        )
        for e in (True, False)
    ]
    assert error[0] < 0.02
    assert error[1] > 0.1


def test_a_shape_is_left_out_of_every_family():
    """The draw depends on shape and seed alone, and takes about the share."""
    some = shapes().tolist()
    out = left_out(some, 1, 0.25)
    assert left_out(some[::-1], 1, 0.25)[::-1].tolist() == out.tolist()
    assert left_out(some, 2, 0.25).tolist() != out.tolist()
    many = left_out([(k,) for k in range(4000)], 1, 0.25)
    assert many.mean() == pytest.approx(0.25, abs=0.03)


def test_left_out_shapes_do_not_reach_the_fit_that_is_judged():
    """Spoiling left-out steps spoils the error by exactly that much."""
    honest = fit_family(family(noise=0.0))
    assert honest.unseen.p90 < 0.01
    some = family(noise=0.0)
    out = left_out(some.shapes.tolist(), 1, 0.25)
    spoilt = np.where(out, 3.0, 1.0) * some.steps.seconds
    fitted = fit_family(
        Family(
            name=some.name,
            key=some.key,
            steps=some.steps._replace(seconds=spoilt),
            shapes=some.shapes,
        )
    )
    assert fitted.unseen.median == pytest.approx(2 / 3, abs=0.02)


def test_a_profile_takes_its_limits_and_its_uncertainty():
    """Known limits win; the uncertainty is the spread that left-out steps showed."""
    fitted = fit_family(family(limits={"max_context": 4096.0, "kv_capacity": 1e5}))
    assert fitted.profile.max_context == 4096
    assert fitted.profile.kv_capacity == 1e5
    wide = as_profile(TRUE, ProfileKey(), {}, Residual(0.1, 0.5, 9))
    assert wide.uncertainty == pytest.approx(math.log(1.5) / 1.645)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: take(s, np.arange(len(s.batch)) < 5), "the table: 5 steps; .* at least 8"),
        (lambda s: s._replace(batch=-s.batch), "batch of step 0 is -1.0"),
        (lambda s: s._replace(context=s.context * np.nan), "context of step 0 is nan"),
        (lambda s: s._replace(seconds=s.seconds * 0), "step 0 took no time"),
    ],
)
def test_bad_steps_are_refused(change, says):
    """The message names the step and what it should be."""
    with pytest.raises(ConfigError, match=says):
        fit_steps(change(steps_of(TRUE)))


# ---- tables


def write_table(path, change=None, constants=TRUE):
    """A step table as CSV; `change` alters its rows."""
    rows = []
    for (decode, batch, new, cached), seconds in zip(
        shapes().astype(int).tolist(), steps_of(constants, 0.01).seconds, strict=True
    ):
        phase = "decode" if decode else "prefill"
        rows.append(["h100_sxm", "vllm", "org/Model-8B", "bf16", 2, phase, batch, new, cached])
        rows[-1].append(seconds * 1e3)
    if change:
        change(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([(*KEY, *SHAPE, "latency_ms"), *rows])
    return path


def test_a_table_becomes_families(tmp_path):
    """Key, steps and shapes of one's own CSV; the same formula as everywhere."""
    (found,) = read_table(write_table(tmp_path / "steps.csv"))
    assert found.name == "h100_sxm-vllm-model-8b-bf16-tp2"
    assert found.key.tp == 2
    expected = steps_of(TRUE, 0.01)
    for ours, theirs in zip(found.steps, expected, strict=True):
        assert ours == pytest.approx(theirs)
    assert fit_family(found).unseen.good


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda rows: rows[3].__setitem__(9, "fast"), "latency_ms of row 4 is 'fast'"),
        (lambda rows: rows[3].__setitem__(9, 0), "latency_ms of row 4 is 0.0"),
        (lambda rows: rows[2].__setitem__(5, "idle"), "phase of row 3 is 'idle'; prefill or"),
        (lambda rows: rows[0].__setitem__(6, -1), "batch of row 1 is '-1'"),
        (lambda rows: rows.clear(), "an empty table"),
    ],
)
def test_a_bad_table_is_refused(tmp_path, spoil, says):
    """The message names file, row, value and remedy."""
    with pytest.raises(ConfigError, match=says) as refused:
        read_table(write_table(tmp_path / "steps.csv", spoil))
    assert "steps.csv" in str(refused.value)


def test_an_absent_table_or_column_is_named(tmp_path):
    """Files that are not there, and columns that are not."""
    with pytest.raises(ConfigError, match="no such file"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "bare.csv").write_text("gpu,engine\nh100,vllm\n")
    with pytest.raises(ConfigError, match="has a column 'model'"):
        read_table(tmp_path / "bare.csv")


def test_unknown_cards_are_refused():
    """A data sheet is looked up under every spelling the sets use."""
    assert device("h100_sxm") == device("h100-80gb-pcap") == device("H100")
    assert device("RTXPRO6000") == device("rtx_pro_6000_server")
    with pytest.raises(ConfigError, match="unknown GPU 'tpu'; known: a100"):
        device("tpu")


def test_written_profiles_are_read_back(tmp_path):
    """File to profiles and back, residuals beside them."""
    fitted = fit_family(family(MIXTURE))
    write_profiles(
        tmp_path / "mine.yaml",
        source="a test: of ours",
        licence="Apache-2.0",
        profiles={fitted.name: (fitted.profile, {"median": fitted.unseen.median})},
    )
    (read,) = load_profiles(tmp_path).values()
    assert read.key == fitted.profile.key
    assert read.experts == pytest.approx(fitted.profile.experts, rel=1e-3)
    steps = steps_of(TRUE)
    assert step_seconds(read, steps) == pytest.approx(step_seconds(fitted.profile, steps), rel=1e-2)
    assert "median" in (tmp_path / "mine.yaml").read_text()
