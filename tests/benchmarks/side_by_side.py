"""Our data plane beside other gateways, in one interleaved run of `../shared/bench`.

    python -m tests.benchmarks.side_by_side --work W --rounds 4 nginx "vllm-router rr"

Adds two peers to that harness, `relay` (server, relay and upstream with a trivial dispatcher) and
`sluice` (the whole gateway: eight replicas on the harness's two engines, memory store, a tenant
with a key and quotas, decision log), keeps all gateways up and visits them in a new random order
each round. Prints CPU per request and per token and the ratio to nginx in the same round: the first
three rows of DESIGN section 13. `--python` runs our two peers under another interpreter: one built
without profile-guided optimisation (pyenv's default) costs about a tenth more.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

import yaml

from gateway.tenants import hash_of

ROOT = Path(__file__).parents[2]


def load_bench(folder):
    """The harness as a module."""
    spec = importlib.util.spec_from_file_location("side_by_side_bench", folder / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(bench, folder):
    """The whole gateway's configuration, written into the work folder."""
    engines = [f"http://127.0.0.1:{port}" for port in (bench.E1, bench.E2)]
    settings = {
        "models": {"mock-model": {"variants": {"mock-model": {"quality": 0.9}}}},
        "fleet": [
            {"kind": "url", "name": f"r{i}", "url": engines[i % 2], "variant": "mock-model"}
            for i in range(8)
        ],
        "tenants": {
            "bench": {
                "keys": {"one": {"hash": hash_of(bench.KEY)}},
                "quota": {"tokens_per_minute": 1e12, "concurrency": 100_000, "daily_tokens": 1e12},
            }
        },
        "policy": {"kind": "best_fit"},
        "logs": {"decisions": str(folder / "decisions.jsonl")},
    }
    path = folder / "sluice.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def add_ours(bench, config, python):
    """Put our peers into the harness's catalogue."""
    theirs = bench.catalogue
    engines = [f"http://127.0.0.1:{port}" for port in (bench.E1, bench.E2)]
    relay = f"{python} -m tests.benchmarks.relay_gateway --port {{port}} " + " ".join(
        f"--backend {url}" for url in engines
    )
    sluice = f"{python} -m sluice serve -c {config} --port {{port}}"

    def catalogue(port=bench.PORT, *rest):
        env = {"PYTHONPATH": str(ROOT)}
        peers = theirs(port, *rest)
        peers["relay"] = {"cmd": relay.format(port=port), "env": env}
        peers["sluice"] = {"cmd": sluice.format(port=port), "env": env}
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
    parser.add_argument("--python", default=sys.executable, help="interpreter of our two peers")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = load_bench(args.bench)
    add_ours(bench, configured(bench, args.work), args.python)
    out = args.work / f"side_by_side_{os.getpid()}.jsonl"
    ours = ["relay", "sluice"]
    sys.argv = ["bench.py", "--work", str(args.work), "--out", str(out)]
    sys.argv += ["--rounds", str(args.rounds), "--seed", str(args.seed), *args.peers, *ours]
    bench.main()
    print(report([json.loads(line) for line in out.read_text().splitlines()]))  # noqa: T201
    print(out)  # noqa: T201


if __name__ == "__main__":
    main()
