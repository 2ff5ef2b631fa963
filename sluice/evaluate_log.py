"""`sluice evaluate-log FILE`: what another policy would have given, from a decision log."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from domain.errors import ConfigError
from gateway.decision_log import log_files
from sluice.cli import DONE, FAILED

if TYPE_CHECKING:
    from training.ope import Estimate, Log

EXAMPLE = (
    "sluice evaluate-log .sluice/decisions.jsonl --weight p_slo=1 --weight quality=0.3 "
    "--within 0.02 --reward quality"
)

CAVEAT = (
    "latency interferes: another policy would have met other queues. Trust this for quality and "
    "cost; for limits and latency replay the trace in the simulator or switch back and forth live."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("log", type=Path, help="a decision log written with `explore` above 0")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--weight",
        action="append",
        metavar="TRAIT=W",
        help="a weight of the `linear` policy to be judged; repeat for more",
    )
    target.add_argument("--entry", help="a `linear` entry of the registry instead")
    parser.add_argument("--registry", type=Path, default=Path(".sluice/policies"))
    parser.add_argument(
        "--within",
        type=float,
        help="take only routes so near to the best P(SLO), as exploration did (default 0.02)",
    )
    parser.add_argument(
        "--reward",
        action="append",
        help="met, quality, e2e or cost; repeat for more (default: quality, and cost with prices)",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="REPLICA=P",
        help="per 1,000 tokens of work (prompt + 5 x output); repeat for every replica",
    )
    parser.add_argument("--json", action="store_true", help="print the estimates as JSON")


def run(args: Namespace) -> int:
    """Estimate and print; 1 if every estimate was refused."""
    from training.ope import evaluate, linear_target, read

    files = list(log_files(args.log))
    if not files:
        raise ConfigError(f"no decision log at {args.log}")
    prices = _numbers(args.price, "--price") or None
    log = read(files, prices)
    weights, within = _target(args)
    target = linear_target(log, weights, within)
    rewards = args.reward or ["quality", *(["cost"] if prices else [])]
    found = [estimate for reward in rewards for estimate in evaluate(log, target, reward)]
    if args.json:
        shown = {"left_out": log.left_out, "estimates": [asdict(e) for e in found]}
        print(json.dumps(shown | ({"caveat": CAVEAT} if _interferes(found) else {})))
    else:
        print("\n".join(_text(log, found)))
    return FAILED if all(e.refused for e in found) else DONE


def _interferes(found: Sequence[Estimate]) -> bool:
    return any(e.interferes for e in found)


def _target(args: Namespace) -> tuple[dict[str, float], float]:
    if args.entry is None:
        within = 0.02 if args.within is None else args.within
        return _numbers(args.weight, "--weight"), within
    from policies.registry import read_entry

    policy = read_entry(args.registry, args.entry).policy
    if policy.kind != "linear":
        raise ConfigError(f"{args.entry!r} is {policy.kind}; a log can judge `linear` policies")
    within = policy.within if args.within is None else args.within
    return {str(k): v for k, v in policy.weights.items()}, within


def _numbers(words: Sequence[str], flag: str) -> dict[str, float]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError as exc:
            raise ConfigError(f"{flag} takes NAME=NUMBER, not {word!r}") from exc
    return found


def _text(log: Log, found: Sequence[Estimate]) -> list[str]:
    lines = [f"{len(log)} decisions can be used"]
    if log.left_out:
        lines.append("left out: " + ", ".join(f"{n} {why}" for why, n in log.left_out.items()))
    for e in found:
        if e.refused:
            lines.append(f"{e.reward:<8} {e.method:<7} refused: {e.refused}")
        else:
            lines.append(
                f"{e.reward:<8} {e.method:<7} {e.value:.4f}  [{e.low:.4f}, {e.high:.4f}]  "
                f"ESS {e.ess:.0f}"
            )
    return [*lines, *([CAVEAT] if _interferes(found) else [])]
