"""Six policies on the real local fleet: traces replayed at multiples of the fleet's own knee.

    python benchmarks/local_policies.py --out .sluice/local_policies [--cells
    servegen@1.0,azure@1.0]

For each trace the knee is measured first: what the fleet completes per second when everything is
offered at once, then least requests at 85 % of that (--start), and 15 % more or less again and
again until the share of limits met has crossed 90 %; the knee is where 90 % lies between the last
two (linear). Loads are multiples of it. Each run starts a fresh gateway and fleet; runs of one cell
follow each other in random order, with runs of one policy (the noise floor) between them. Every
finished run is kept in --out, so that an interrupted job goes on where it stopped.

The report has goodput, attainment and latencies per policy, the noise floor as half the range of
the repeated runs, and how well P(SLO) did: its Brier score beside the base rate's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
POLICIES = (
    "round_robin",
    "weighted_round_robin",
    "least_requests",
    "power_of_two",
    "lmetric",
    "best_fit",
)
TRACES = {
    "azure": ("azure_code", 500),
    "servegen": ("servegen/m-large", 300),
    "small": ("servegen/m-small", 300),
}
"""Name in --cells: trace, requests of a run."""
UNHURRIED = ("--class", "batch")
"""No limits: everything offered at once is served in the end."""
SHAPE = ("--divide", "16", "--min-tokens", "8", "--max-prompt", "512", "--max-output", "128")


class Gateway:
    """`sluice serve` over a fresh local fleet with one policy, as a child process."""

    def __init__(self, config: Path, policy: str, out: Path) -> None:
        settings = yaml.safe_load(config.read_text())
        kind, *options = policy.split(":")
        given = (option.partition("=") for option in options)
        settings["policy"] = {"kind": kind} | {k: yaml.safe_load(v) for k, _, v in given}
        for slo_class in settings["classes"].values():
            slo_class["max_wait_ms"] = 600_000  # nothing is refused for its wait alone
        settings["server"] = {"port": 0}
        settings["logs"] = {"decisions": str(out / "decisions.jsonl"), "keep": 0}
        out.mkdir(parents=True, exist_ok=True)
        (out / "decisions.jsonl").unlink(missing_ok=True)
        self.config = out / "gateway.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "sluice", "serve", "-c", str(self.config), "--json"]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(out / "gateway.log").open("w"),
            text=True,
        )

    def __enter__(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the gateway did not start; see {self.config.parent}/gateway.log")
        url: str = json.loads(line)["url"]
        with urllib.request.urlopen(f"{url}/ready", timeout=60) as answer:
            answer.read()
        return url

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def replay(
    config: Path,
    policy: str,
    trace: str,
    rate: float,
    count: int,
    data: str | None,
    out: Path,
    promise: Sequence[str],
    extra: Sequence[str] = (),
    shape: Sequence[str] = SHAPE,
) -> dict[str, Any]:
    """One run: a fresh gateway, the trace's first `count` requests at `rate` per second; its
    report. `promise` (class and limits), `extra`, `shape` (of lengths): arguments of `sluice
    replay`.
    """
    done = out / "report.json"
    if done.exists():
        kept: dict[str, Any] = json.loads(done.read_text())
        return kept | {"joined": joined(out)}
    with Gateway(config, policy, out) as url:
        command = [sys.executable, "-m", "sluice", "replay", "-c", str(out / "gateway.yaml")]
        command += ["--url", url, "--trace", TRACES[trace][0], "--count", str(count), *shape]
        command += ["--rate", f"{rate:.4f}", *promise, "--ignore-eos", "--json"]
        command += ["--out", str(out / "requests.jsonl"), "--key", "sk-local-playground", *extra]
        command += ["--data", data] if data else []
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not result.stdout.strip():
        raise SystemExit(result.stderr)
    report: dict[str, Any] = json.loads(result.stdout)
    report["policy"] = policy
    report["joined"] = joined(out)
    lines = [json.loads(x) for x in (out / "requests.jsonl").read_text().splitlines()]
    report["makespan"] = max(x["ended"] for x in lines if x["ended"] is not None)
    done.write_text(json.dumps(report))
    return report


def joined(out: Path) -> dict[str, Any]:
    """Whether decision log and requests join one to one by id, and each sent request has both
    halves; Brier score of P(SLO) over these, and the base rate's. An answer's headers do not do for
    that: a stream that waits has them before its route is chosen.
    """
    lines = [json.loads(x) for x in (out / "decisions.jsonl").read_text().splitlines()]
    ids = [line["id"] for line in lines]
    sent = [line for line in lines if line["outcome"]["sent"] is not None]
    both = [line for line in sent if line["predicted"] is not None]
    met = [float(line["outcome"]["met"]) for line in both]
    share = statistics.fmean(met) if met else float("nan")
    off = [(line["predicted"]["p_slo"] - y) ** 2 for line, y in zip(both, met, strict=True)]
    return {
        "lines": len(lines),
        "ids": len(set(ids)),
        "sent": len(sent),
        "with_prediction": len(both),
        "brier": statistics.fmean(off) if off else float("nan"),
        "brier_base_rate": share * (1.0 - share),
    }


def knee(
    config: Path,
    trace: str,
    data: str | None,
    out: Path,
    count: int,
    promise: Sequence[str],
    extra: Sequence[str] = (),
    start: float = 0.85,
) -> float:
    """Requests per second at which 90 % still meet their limits under least requests."""
    flood = replay(
        config,
        "least_requests",
        trace,
        1000.0,
        count,
        data,
        out / f"{trace}-flood",
        UNHURRIED,
        extra,
    )
    capacity: float = count / flood["makespan"]
    tried: list[tuple[float, float]] = []
    rate = start * capacity
    while not tried or (tried[0][1] >= 0.9) == (tried[-1][1] >= 0.9):
        if not 0.2 < rate / capacity < 3.0:
            raise SystemExit(f"{trace}: no knee between a fifth of the flood's rate and thrice it")
        folder = out / f"{trace}-knee-{rate / capacity:.3f}"
        run = replay(config, "least_requests", trace, rate, count, data, folder, promise, extra)
        tried.append((rate, run["attainment"]))
        rate *= 1.15 if run["attainment"] >= 0.9 else 0.85
    (r0, a0), (r1, a1) = tried[-2:]
    return r0 + (r1 - r0) * (a0 - 0.9) / (a0 - a1)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "local.yaml")
    parser.add_argument("--data", help="folder of the data sets")
    parser.add_argument("--cells", default="servegen@1.0,servegen@0.7,azure@1.0,azure@0.7")
    parser.add_argument("--policies", default=",".join(POLICIES), help="KIND[:OPTION=VALUE...],...")
    parser.add_argument("--again", default="best_fit", help="which of them runs --floor times")
    parser.add_argument("--floor", type=int, default=5, help="runs of one policy in the first cell")
    parser.add_argument("--knee-count", type=int, default=150, help="requests of a knee run")
    parser.add_argument("--start", type=float, default=0.85, help="first knee run, of the flood's")
    parser.add_argument("--class", dest="slo_class", default="standard", help="class of requests")
    parser.add_argument("--slo", help="limits in place of the class's, as in `sluice replay --slo`")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    promise = ["--class", args.slo_class, *(["--slo", args.slo] if args.slo else [])]
    order = random.Random(args.seed)
    knees: dict[str, float] = {}
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number, cell in enumerate(args.cells.split(",")):
        trace, load = cell.split("@")
        if trace not in knees:
            knees[trace] = knee(
                args.config, trace, args.data, out, args.knee_count, promise, start=args.start
            )
            print(f"{trace}: knee {knees[trace]:.3f} requests/s", file=sys.stderr, flush=True)
        runs = [(policy, 0) for policy in args.policies.split(",")]
        order.shuffle(runs)
        if number == 0:
            again = [(args.again, k) for k in range(1, args.floor)]
            for k, run in enumerate(again):
                runs.insert(1 + 2 * k, run)
        for policy, k in runs:
            folder = out / f"{cell}-{policy}-{k}"
            report = replay(
                args.config,
                policy,
                trace,
                float(load) * knees[trace],
                TRACES[trace][1],
                args.data,
                folder,
                promise,
            )
            results.setdefault(cell, {}).setdefault(policy, []).append(report)
            print(
                f"{cell} {policy} #{k}: attainment {report['attainment']:.3f}",
                file=sys.stderr,
                flush=True,
            )
    print("\n".join(told(knees, results)))
    return 0


def told(knees: dict[str, float], results: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """The tables, as Markdown."""
    lines = [f"Knees (requests/s): {', '.join(f'{k} {v:.3f}' for k, v in knees.items())}", ""]
    for cell, policies in results.items():
        lines += [
            f"**{cell}**",
            "",
            (
                "| policy | runs | goodput/s | attainment | by work | TTFT p50/p99 s "
                "| TPOT p50/p99 ms | Brier / base rate | joined |"
            ),
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for policy, runs in policies.items():
            r = runs[0]
            j = r["joined"]
            share = [x["attainment"] for x in runs]
            mean = statistics.mean(share)
            spread = f" ± {(max(share) - min(share)) / 2:.3f}" if len(runs) > 1 else ""
            lines.append(
                f"| {policy} | {len(runs)} | {statistics.mean(x['goodput'] for x in runs):.3f} "
                f"| {mean:.3f}{spread} | {r['attainment_by_work']:.3f} "
                f"| {r['ttft']['p50']:.2f} / {r['ttft']['p99']:.2f} "
                f"| {1e3 * r['tpot']['p50']:.0f} / {1e3 * r['tpot']['p99']:.0f} "
                f"| {j['brier']:.3f} / {j['brier_base_rate']:.3f} "
                f"| {j['ids']} of {r['requests']}, {j['with_prediction']} of {j['sent']} |"
            )
        lines.append("")
    return lines


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
