"""What the gateway adds to the gap between tokens: 200 streams while 200 decisions a second run.

    python -m tests.benchmarks.token_gaps --work W [--bench ../shared/bench] [--json]

W holds (or gets) the two C tools of the bench. Gateway on core 0, engine and clients on core 1.
Each round measures direct, through the gateway, and through the gateway beside short JSON requests
(`decisions` says how many a second went through); a row is the median over rounds, in milliseconds.
The last row of DESIGN section 13's table about gaps is `added p99`.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
STREAMS = "-c 200 -n 600 -d 60 --stream --tokens 64 --ramp-ms 1280"
DECISIONS = 200
"""Requests per second that are decided while the streams run; open loop."""


def built(bench, work):
    """The C tools, compiled once."""
    work.mkdir(parents=True, exist_ok=True)
    for tool in ("mock_engine", "loadgen"):
        if not (work / tool).exists():
            source = [str(bench / f"{tool}.c"), "-o", str(work / tool)]
            subprocess.run(["gcc", "-O2", *source, "-lm"], check=True)


def load(work, port, arguments, model):
    """Start the load generator on core 1."""
    command = ["taskset", "-c", "1", str(work / "loadgen"), f"http://127.0.0.1:{port}"]
    return subprocess.Popen(
        [*command, *shlex.split(arguments), "--model", model], stdout=subprocess.PIPE, text=True
    )


def decisions(port):
    """Unstreamed one-token requests at `DECISIONS` a second, from core 1, until terminated."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "sluice", "replay", "--poisson"]
    command += ["--url", f"http://127.0.0.1:{port}", "--rate", str(DECISIONS), "--count", "12000"]
    command += ["--prompt", "16", "--output", "1", "--no-stream", "--model", "mock-model", "--json"]
    beside = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    before = counted(port)
    while counted(port) < before + DECISIONS:
        time.sleep(0.1)
    return beside


def round_of(work, engine, gateway, delay_us):
    """One round: p50 and p99 gaps in ms of the three cases."""
    url = f"http://127.0.0.1:{engine}/mock/config?delay_us={delay_us}"
    urllib.request.urlopen(url, data=b"", timeout=5).read()
    found = {}
    for case, port in (("direct", engine), ("gateway", gateway), ("with decisions", gateway)):
        beside = decisions(gateway) if case == "with decisions" else None
        before, began = counted(gateway), time.monotonic()
        streams = json.loads(load(work, port, STREAMS, "mock-model").communicate(timeout=120)[0])
        assert streams["errors"] == 0, streams
        found[case] = {k: streams["itl_us"][k] / 1e3 for k in ("p50", "p99", "max")}
        found[case]["decisions per second"] = (counted(gateway) - before) / (
            time.monotonic() - began
        )
        if beside is not None:
            beside.terminate()
            beside.wait(timeout=30)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--bench", type=Path, default=ROOT.parent / "shared" / "bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18961, help="first of four ports")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    built(args.bench, args.work)
    engines, gateway = (args.port, args.port + 1), args.port + 2
    urls = [f"http://127.0.0.1:{port}" for port in engines]
    serve = f"{sys.executable} -m sluice serve --port {gateway} --json"
    serve += "".join(f" --backend {url}" for url in urls)
    mock = ["taskset", "-c", "1", str(args.work / "mock_engine"), *map(str, engines)]
    processes = [subprocess.Popen(mock, stdout=subprocess.DEVNULL)]
    try:
        time.sleep(0.3)
        pinned = ["taskset", "-c", "0", *shlex.split(serve)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        shell = subprocess.Popen(
            pinned, cwd=args.work, env=environment, stdout=subprocess.PIPE, text=True
        )
        processes.append(shell)
        assert shell.stdout.readline(), "the gateway did not start"
        rounds = [round_of(args.work, engines[0], gateway, 20_000) for _ in range(args.rounds)]
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)
    report = {
        case: {k: statistics.median(r[case][k] for r in rounds) for k in rounds[0][case]}
        for case in rounds[0]
    }
    report["added p99"] = report["with decisions"]["p99"] - report["direct"]["p99"]
    told = [json.dumps(report)] if args.json else [f"{k}: {v}" for k, v in report.items()]
    print("\n".join(told))  # noqa: T201


def counted(port):
    """Requests the gateway has settled so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("sluice_requests_total{"))


if __name__ == "__main__":
    main()
