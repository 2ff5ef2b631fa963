"""`make bench`: our figures beside nginx from `../shared/bench`, where it is there."""

import json
import shutil
import statistics
import subprocess
import sys

import pytest

from tests.benchmarks.side_by_side import ROOT

BENCH = ROOT.parent / "shared" / "bench"
BAR_US = 600
"""DESIGN section 13, first bar: CPU per request of the whole gateway."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(not BENCH.is_dir(), reason="../shared/bench is not there")
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is the yardstick")
def test_cost_beside_nginx(tmp_path, capfd):
    """Every stream whole and in order; CPU per request under the first bar."""
    command = [sys.executable, "-m", "tests.benchmarks.side_by_side", "nginx", "--rounds", "2"]
    command += ["--bench", str(BENCH), "--work", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    with capfd.disabled():
        print(capfd.readouterr().out)  # noqa: T201
    (out,) = tmp_path.glob("side_by_side_*.jsonl")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["peer"] for row in rows} == {"nginx", "relay", "sluice"}
    assert sum(row["errors"] for row in rows) == 0
    ours = [r for r in rows if r["peer"] == "sluice" and r["scenario"] == "ns_c32"]
    assert statistics.median(row["cpu_us_per_req"] for row in ours) <= BAR_US
