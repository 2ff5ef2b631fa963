from dataclasses import replace

import numpy as np
import pytest

from domain.errors import ConfigError
from training.calibrate_e2e import (
    SHAPES,
    ClosedLoop,
    _normal,
    _slopes,
    by_physics,
    folds_of,
    half_years,
    layout,
    left_out_predictions,
    profile_of,
    read_points,
    steady_state,
    take,
)

COLUMNS = (
    "system", "backend", "model", "precision", "mode", "isl", "osl", "concurrency", "tp_size",
    "attention_dp_size", "moe_tp_size", "moe_ep_size", "ttft_ms", "tpot_ms",
)  # fmt: skip
CONFIGURATIONS = [
    (system, backend, model, precision)
    for system in ("h100_sxm", "h200_sxm", "b200_sxm")
    for backend in ("vllm", "sglang")
    for model, precision in (
        ("meta-llama/Llama-3.1-70B", "fp8"), ("openai/gpt-oss-120b", "fp4"),
        ("Qwen/Qwen3-32B", "bf16"),
    )
]  # fmt: skip


def write(path, rows):
    """Points as Parquet with the columns of the set."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(
        pa.table(dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))), path
    )
    return path


def rows(configurations=CONFIGURATIONS):
    """Points of every configuration, not timed yet."""
    return [
        [*c, "agg", isl, osl, float(load), float(n), 1.0, float(n), 1.0, 100.0, 10.0]
        for c in configurations
        for n in (4, 8)
        for isl, osl in ((1024, 1024), (8192, 512))
        for load in (2, 8, 32, 64)
    ]


@pytest.fixture
def world(tmp_path):
    """Points timed by a model whose efficiencies are known, with 3 % of noise."""
    points = read_points(write(tmp_path / "blank.parquet", rows()))
    truth = ClosedLoop().fit(points, rounds=0)
    rng = np.random.default_rng(3)
    theta = truth.theta_.copy()
    for name, k in truth.names_.items():
        if not name.startswith(("pair", "own")):
            theta[16 + k :: len(truth.names_)] = 0.4 * rng.standard_normal()
    truth.theta_ = theta
    tpot, ttft = truth.predict(points)
    blur = np.exp(0.03 * rng.standard_normal((2, len(points))))
    keys = {
        (*points.configuration[i], points.isl[i], points.concurrency[i], points.gpus[i]): i
        for i in range(len(points))
    }
    timed = rows()
    for row in timed:
        i = keys[(*row[:4], float(row[5]), row[7], row[8])]
        row[12], row[13] = 1e3 * ttft[i] * blur[0, i], 1e3 * tpot[i] * blur[1, i]
    return read_points(write(tmp_path / "timed.parquet", timed))


def test_layouts_are_gpus_and_ranks():
    """Sizes the set writes as products are undone; dense models split by tensor alone."""
    moe, dense = SHAPES["deepseek-ai/DeepSeek-R1"], SHAPES["Qwen/Qwen3-32B"]
    assert layout(moe, 64, 1, 8, 8) == (8, 1)
    assert layout(moe, 1, 64, 8, 8) == (8, 8)
    assert layout(moe, 4, 4, 1, 16) == (4, 4)
    assert layout(moe, 1, 8, 1, 8) == (8, 8)
    assert layout(moe, 8, 1, 8, 1) == (8, 1)
    assert layout(dense, 2, 0, 4, 1) == (2, 1)


def test_physics_by_hand():
    """Llama-3.1-70B in FP8 on two H200: half of 70.6 GB over 4.8 TB/s; MLA's KV is not split."""
    found = by_physics("h200_sxm", SHAPES["meta-llama/Llama-3.1-70B"], "fp8", 2, 1)
    assert found.weights == pytest.approx(70.6e9 / 2 / 4.8e12)
    assert found.per_token == pytest.approx(2 * 70.6e9 / (2 * 989e12 * 2))
    assert found.per_context == pytest.approx(327_680 / 2 / 2 / 4.8e12)
    latent = [
        by_physics("b200_sxm", SHAPES["deepseek-ai/DeepSeek-R1"], "fp8", n, 1) for n in (4, 8)
    ]
    assert latent[0].per_context == latent[1].per_context
    assert latent[0].experts == pytest.approx(2 * latent[1].experts)


def test_slopes_are_those_of_the_steady_state(world):
    """Gradient and curvature of half the squared log TPOT and TTFT, against finite differences."""
    some = take(world, np.arange(0, len(world), 7))
    model = ClosedLoop().fit(some, rounds=2)
    member = model._member(some)
    rows, which = np.unique(member, axis=0, return_inverse=True)

    def logs(theta):
        return steady_state(model._inputs(theta, some, member), some)

    slopes = _slopes(model._inputs(model.theta_, some, member), some)
    pull, curve = _normal(slopes, logs(model.theta_), rows, which.ravel())
    moved = []
    for k in range(len(model.theta_)):
        ahead = model.theta_.copy()
        ahead[k] += 1e-6
        moved.append((logs(ahead) - logs(model.theta_)).ravel() / 1e-6)
    by_difference = np.array(moved)
    assert pull == pytest.approx(by_difference @ logs(model.theta_).ravel(), abs=2e-2, rel=1e-4)
    assert curve == pytest.approx(by_difference @ by_difference.T, abs=1e-3, rel=1e-3)


def test_a_run_written_down_twice_counts_once(tmp_path):
    """Also where tensor and expert sizes of the same eight GPUs are written in two ways."""
    moe = ("h200_sxm", "vllm", "deepseek-ai/DeepSeek-R1", "fp8")
    again = [[*r[:8], 8.0, 1.0, *sizes, *r[12:]] for r in rows([moe]) for sizes in ((8, 1), (1, 8))]
    assert len(again) == 2 * len(rows([moe]))
    distinct = {tuple(r[5:8]) for r in again}
    assert len(read_points(write(tmp_path / "again.parquet", again))) == len(distinct)


def test_a_configuration_nobody_measured_is_predicted(world):
    """Effects of GPU, engine, model and precision carry over, to half of what
    bare physics is off by.
    """
    bare = ClosedLoop().fit(world, rounds=0).predict(world)
    told = left_out_predictions(world, folds=6)
    for got, without, measured in zip(told, bare, (world.tpot, world.ttft), strict=True):
        error, before = (np.median(np.abs(x / measured - 1)) for x in (got, without))
        assert error < 0.25
        assert error < before / 2


def test_an_engine_that_became_faster_is_known_by_the_date(world):
    """A configuration nobody measured, of which only the day is known. A part of what is faster
    goes to the configurations' own effects.
    """
    names = sorted(set(world.configuration))
    day = np.random.default_rng(4).uniform(-0.5, 0.6, len(names))
    when = day[[names.index(c) for c in world.configuration]]
    faster = np.exp(-0.8 * when)
    dated = replace(world, when=when, tpot=world.tpot * faster, ttft=world.ttft * faster)
    blind = replace(dated, when=np.full(len(world), np.nan))
    error = [
        np.median(np.abs(left_out_predictions(points, folds=6)[0] / dated.tpot - 1))
        for points in (dated, blind)
    ]
    assert error[0] < 0.9 * error[1]


def test_days_count_in_half_years():
    assert half_years("2026-01-01") == 0.0
    assert half_years("2026-07-02T08:00:00") == pytest.approx(1.0, abs=0.01)
    assert np.isnan(half_years(None))
    assert np.isnan(half_years(float("nan")))


def test_left_out_means_the_whole_configuration(world):
    """Spoiling one configuration's times leaves its own prediction as it was."""
    target = CONFIGURATIONS[4]
    own = np.array([c == target for c in world.configuration])
    before = left_out_predictions(world, folds=3)
    spoilt = take(world, np.ones(len(world), bool))
    spoilt.tpot[own] *= 7
    spoilt.ttft[own] *= 7
    after = left_out_predictions(spoilt, folds=3)
    for k in range(2):
        assert after[k][own] == pytest.approx(before[k][own])
    for folds, groups in ((3, 3), (0, len(CONFIGURATIONS))):
        fold = folds_of(world, folds, 1)
        assert len(set(fold.tolist())) == groups
        assert len(set(fold[own].tolist())) == 1


def test_a_profile_for_a_layout(world):
    """A fitted profile holds the layout; only a mixture of experts has experts."""
    model = ClosedLoop().fit(world)
    constants = model.constants(world)
    for i in range(0, len(world), 16):
        profile = profile_of(constants, world, i, 0.2)
        assert profile.key.tp == world.gpus[i]
        assert (profile.experts > 0) == ("gpt-oss" in profile.key.model)
        assert profile.kv_capacity > 1


def test_bad_points_are_refused(tmp_path):
    """Unknown models, missing columns and sets without a usable point are named."""
    odd = rows([("h100_sxm", "vllm", "org/unheard-of", "bf16")])
    with pytest.raises(ConfigError, match="unknown model 'org/unheard-of'; known: "):
        read_points(write(tmp_path / "odd.parquet", odd))
    split = [[*r[:4], "disagg", *r[5:]] for r in rows()]
    with pytest.raises(ConfigError, match="no aggregated point"):
        read_points(write(tmp_path / "split.parquet", split))
    with pytest.raises(FileNotFoundError, match="none"):
        read_points(tmp_path / "none.parquet")
