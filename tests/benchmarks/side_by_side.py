"""Our data plane beside other gateways, in one interleaved run of `../shared/bench`.

    python -m tests.benchmarks.side_by_side --work W --rounds 4 nginx "vllm-router rr"

Adds two peers to that harness, `relay` (server, relay and upstream with a trivial dispatcher) and
`sluice` (the command given with `--cmd`, with {port}, {e1}, {e2} filled in), keeps all gateways up
and visits them in a new random order each round. Prints CPU per request and per token and the
ratio to nginx in the same round: the first three rows of DESIGN section 13.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_bench(folder):
    """The harness as a module."""
    spec = importlib.util.spec_from_file_location("side_by_side_bench", folder / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_ours(bench, cmd):
    """Put our peers into the harness's catalogue."""
    theirs = bench.catalogue
    engines = [f"http://127.0.0.1:{port}" for port in (bench.E1, bench.E2)]
    relay = f"{sys.executable} -m tests.benchmarks.relay_gateway --port {{port}} " + " ".join(
        f"--backend {url}" for url in engines
    )

    def catalogue(port=bench.PORT, *rest):
        env = {"PYTHONPATH": str(ROOT)}
        peers = theirs(port, *rest)
        peers["relay"] = {"cmd": relay.format(port=port), "env": env}
        if cmd:
            filled = cmd.format(port=port, e1=engines[0], e2=engines[1])
            peers["sluice"] = {"cmd": filled, "env": env}
        return peers

    bench.catalogue = catalogue


def report(rows):
    """Medians with ranges, ratios to nginx of the same round."""
    base = {(r["round"], r["scenario"]): r for r in rows if r["peer"] == "nginx"}
    columns = (("ns_c32", "cpu_us_per_req"), ("dense_c200", "cpu_us_per_token"))
    columns += (("paced_c200", "cpu_us_per_token"),)
    lines = ["| peer | us/request | x nginx | us/token dense | x nginx | kept | paced | x nginx |"]
    lines.append("|---" * 8 + "|")
    for peer in dict.fromkeys(r["peer"] for r in rows):
        cells = [peer]
        for scenario, figure in columns:
            mine = [r for r in rows if r["peer"] == peer and r["scenario"] == scenario]
            kept = [r for r in mine if scenario != "dense_c200" or r["reads_per_event"] >= 0.95]
            values = [r[figure] for r in kept]
            ratios = [r[figure] / base[r["round"], scenario][figure] for r in kept if base]
            shown = f"{statistics.median(values):.1f}" if values else "-"
            spread = f" [{min(values):.1f}-{max(values):.1f}]" if values else ""
            cells += [shown + spread, f"{statistics.median(ratios):.2f}" if ratios else "-"]
            if scenario == "dense_c200":
                cells.append(f"{len(kept)}/{len(mine)}")
        errors = sum(r["errors"] for r in rows if r["peer"] == peer)
        lines.append("| " + " | ".join(cells) + f" |{f' {errors} errors' if errors else ''}")
    return "\n".join(lines)


def main():
    """Run the harness and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", default=["nginx"])
    parser.add_argument("--bench", type=Path, default=ROOT.parent / "shared" / "bench")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cmd", help="the full gateway, with {port}, {e1}, {e2}")
    args = parser.parse_args()
    bench = load_bench(args.bench)
    add_ours(bench, args.cmd)
    out = args.work / f"side_by_side_{os.getpid()}.jsonl"
    ours = ["relay", *(["sluice"] if args.cmd else [])]
    sys.argv = ["bench.py", "--work", str(args.work), "--out", str(out)]
    sys.argv += ["--rounds", str(args.rounds), "--seed", str(args.seed), *args.peers, *ours]
    bench.main()
    print(report([json.loads(line) for line in out.read_text().splitlines()]))  # noqa: T201
    print(out)  # noqa: T201


if __name__ == "__main__":
    main()
