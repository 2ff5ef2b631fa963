"""Every data set reads into a trace whose totals are those its README states."""

import subprocess
import sys

import numpy as np
import pytest

from training.trace_sources import (
    SOURCES,
    agents,
    azure_code,
    columns,
    default_data,
    load,
    mooncake,
    provider_log,
    servegen,
    sharegpt,
    vllm_log,
)

DATA = default_data()
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets at {DATA}; set SLUICE_DATA"
)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def percentiles(values):
    return np.percentile(values, [5, 50, 95, 99]).round().tolist()


def test_azure_code(rng):
    t = azure_code(DATA)
    assert len(t) == 8819
    assert t.duration / 60 == pytest.approx(57, abs=0.5)
    assert t.rate == pytest.approx(2.57, abs=0.01)
    gaps = np.diff(t.arrival)
    assert gaps.std() / gaps.mean() == pytest.approx(13, abs=0.5)
    assert gaps.max() == pytest.approx(217, abs=1)
    assert percentiles(t.prompt) == [75, 1469, 7303, 7436]
    assert percentiles(t.output) == [6, 13, 90, 251]


def test_mooncake(rng):
    t = mooncake(DATA, rng)
    assert len(t) == 12_031
    assert t.rate == pytest.approx(3.40, abs=0.01)
    assert t.prompt.mean() == pytest.approx(12_035, abs=1)
    assert percentiles(t.prompt)[:2] == [901, 6909]
    assert percentiles(t.output) == pytest.approx([10, 350, 698, 1118], abs=1)
    # its blocks give the hits that the source counts: 37 % of all input tokens, row by row
    seen: set[int] = set()
    hits = np.zeros(len(t))
    for i in range(len(t)):
        leading = 0
        for block in t.blocks_of(i).tolist():
            if block not in seen:
                break
            leading += 1
        hits[i] = min(leading * 512, t.prompt[i])
        seen.update(t.blocks_of(i).tolist())
    assert hits.sum() / t.prompt.sum() == pytest.approx(0.37, abs=0.005)


def test_mooncake_ticks_are_spread_but_not_mixed(rng):
    raw = columns(DATA / "mooncake" / "mooncake_conversation.parquet", ["arrival_s"])["arrival_s"]
    t = mooncake(DATA, rng)
    assert len(np.unique(raw)) == 1180
    assert len(np.unique(t.arrival)) == len(t)
    assert np.all((t.arrival >= raw) & (t.arrival <= raw + 3.0))


@pytest.mark.parametrize(
    ("workload", "start", "seconds"),
    [("m-large", 0.0, 3600.0), ("m-small", 36_000.0, 600.0), ("deepseek-r1", 0.0, 7200.0)],
)
def test_servegen_mixtures_have_the_rate_of_their_clients(workload, start, seconds, rng):
    rates = columns(DATA / "servegen" / "client_rates.parquet")
    lengths = columns(DATA / "servegen" / "client_lengths.parquet", ["workload", "client"])
    known = np.unique(lengths["client"][lengths["workload"] == workload])
    begin = rates["window_start_s"]
    mine = (rates["workload"] == workload) & np.isin(rates["client"], known)
    mine &= (begin >= start) & (begin < start + seconds)
    t = servegen(DATA, workload, rng, start=start, seconds=seconds)
    expected = rates["rate_rps"][mine].sum() * 600.0
    assert len(t) == pytest.approx(expected, rel=0.1)
    assert len(t.tenants) <= len(known)


def test_servegen_lengths_have_the_rate_weighted_mean_of_their_profiles(rng):
    """A day of it; a row's mean is that of the histogram its quantiles came from."""
    rates = columns(DATA / "servegen" / "client_rates.parquet")
    lengths = columns(DATA / "servegen" / "client_lengths.parquet")
    total = weight = 0.0
    for row in np.flatnonzero(rates["workload"] == "deepseek-r1"):
        mine = (lengths["workload"] == "deepseek-r1") & (lengths["field"] == "output_tokens")
        mine &= lengths["client"] == rates["client"][row]
        starts = lengths["window_start_s"][mine]
        profile = max(np.searchsorted(starts, rates["window_start_s"][row], "right") - 1, 0)
        total += rates["rate_rps"][row] * lengths["mean"][mine][profile]
        weight += rates["rate_rps"][row]
    t = servegen(DATA, "deepseek-r1", rng, seconds=86_400.0, thin=0.3)
    assert t.output.mean() == pytest.approx(total / weight, rel=0.04)


def test_servegen_names_what_it_knows(rng):
    with pytest.raises(ValueError, match="known: deepseek-r1, m-large"):
        servegen(DATA, "m-huge", rng)


def test_sharegpt(rng):
    t = sharegpt(DATA, rng)
    assert len(t) == 42_923
    sizes = np.bincount(t.session)
    assert np.median(sizes) == 3
    assert np.percentile(sizes, 95) == 8
    assert percentiles(t.output) == pytest.approx([23, 253, 674, 775], abs=5)
    assert t.roots.sum() == len(sizes)


def test_agents(rng):
    whole = agents(DATA, rng)
    assert len(whole) == 1223
    fixes = agents(DATA, rng, agent="miniswe")
    later = ~fixes.roots
    shared = np.array(
        [len(np.intersect1d(fixes.blocks_of(int(i)), fixes.blocks_of(int(fixes.follows[i]))))
         for i in np.flatnonzero(later)]
    )  # fmt: skip
    assert shared.sum() * 64 / fixes.prompt[later].sum() > 0.85  # README: 93 % of all its input
    assert np.all(fixes.arrival[later] >= fixes.arrival[fixes.follows[later]])


def test_vllm_logs():
    runs = [
        ("RTX4090", "meta-llama/Llama-3.1-8B", 60.0),
        ("RTXPRO6000", "Qwen/Qwen3-32B", 41.0),
        ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 9.4),
    ]
    for gpu, model, ttft in runs:
        log = vllm_log(DATA, gpu, model)
        assert len(log.trace) == 300
        assert np.median(log.ttft) == pytest.approx(ttft, rel=0.02)
        assert np.all(log.queue <= log.ttft)


def test_provider_logs(rng):
    log = provider_log(DATA, rng)
    assert len(log.trace) == 1645
    assert log.failed.sum() == 3
    medians = [
        np.nanmedian(log.ttft[log.trace.tenant_id == k]) for k in range(len(log.trace.tenants))
    ]
    assert min(medians) == pytest.approx(0.2, abs=0.1)
    assert max(medians) <= 5.7


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_loads_by_name(name, rng):
    t = load(name, DATA, rng, seconds=60.0)
    assert len(t) > 0
    assert np.all(np.isfinite(t.arrival))


def test_an_unknown_source_is_named(rng):
    with pytest.raises(ValueError, match="unknown trace 'azura'"):
        load("azura", DATA, rng)


def test_a_missing_folder_is_named(rng, tmp_path):
    with pytest.raises(FileNotFoundError, match="SLUICE_DATA"):
        azure_code(tmp_path)


def test_importing_traces_stays_light():
    script = (
        "import sys, training.traces, training.trace_sources as t; print('pyarrow' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        cwd=DATA.__class__(__file__).parents[2],
    )  # fmt: skip
    assert run.stdout.strip() == "False"
