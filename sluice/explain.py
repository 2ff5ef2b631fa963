"""`sluice explain ID`: one decision-log record, told so that a person sees why."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.decision_log import log_files, search
from sluice.cli import BAD_INPUT, DONE, FAILED

EXAMPLE = "sluice explain req-3f9a12b4c5d6-1a"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("id", help="the x-request-id that the client got")
    parser.add_argument(
        "--log", type=Path, default=Path(".sluice/decisions.jsonl"), help="the decision log"
    )
    parser.add_argument("--json", action="store_true", help="print the record as it is")


def run(args: Namespace) -> int:
    """Find the record and tell it."""
    if not any(log_files(args.log)):
        print(f"no decision log at {args.log}; name it with --log", file=sys.stderr)
        return BAD_INPUT
    record = search(args.log, args.id)
    if record is None:
        print(f"no request {args.id!r} in {args.log} and its older files", file=sys.stderr)
        return FAILED
    print(json.dumps(record) if args.json else "\n".join(story(record)))
    return DONE


def story(record: dict[str, Any]) -> Iterator[str]:
    """The record in sentences."""
    outcome, slo = record["outcome"], record["slo"]
    limits = ", ".join(
        f"{name} {_ms(slo[name])}" for name in ("ttft", "tpot", "e2e") if slo[name] is not None
    )
    yield (
        f"{record['id']}: tenant {record['tenant']}, class {record['class']}, model "
        f"{record['model']}, {'streamed' if record['stream'] else 'in one piece'}"
    )
    yield f"promised: {limits or 'nothing'}" + (
        "" if slo["quality"] is None else f", quality {slo['quality']:g}"
    )
    predicted = record["predicted"]
    if predicted is None:
        yield f"never sent: {outcome['reason'] or outcome['cause']}"
    else:
        yield (
            f"expected: prompt {record['prompt_tokens']:.0f} tokens, answer "
            f"{predicted['length_p50']:.0f} (half), {predicted['length_p90']:.0f} (nine in ten)"
        )
        yield (
            f"sent to {record['replica']} ({record['variant']}) by policy {record['policy']}, "
            f"propensity {record['propensity']:g}, attempts {record['attempts']}; it had "
            f"{predicted['running']:.0f} running and {predicted['backlog']:.0f} prompt tokens ahead"
        )
        yield (
            f"promised itself: TTFT {_ms(_middle(predicted['ttft']))}, TPOT "
            f"{_ms(_middle(predicted['tpot']))}, P(all limits) {predicted['p_slo']:.2f}"
        )
    yield (
        f"came out: {outcome['cause']} after {_ms(outcome['e2e'])}, TTFT {_ms(outcome['ttft'])}, "
        f"TPOT {_ms(outcome['tpot'])}, {outcome['completion_tokens']:.0f} tokens "
        f"({outcome['usage_source']})"
    )
    met = outcome["met"]
    if met is None:
        yield "not counted: the client left before any limit was missed"
    else:
        yield "all limits met" if met else f"missed; to blame: {outcome['miss']}"
    if record["candidates"]:
        yield ""
        yield f"{'route':<16} {'score':>10} {'P(SLO)':>7} {'TTFT':>9} {'TPOT':>9} {'quality':>8}"
    for c in record["candidates"]:
        chosen = "  <- chosen" if c["route"] == record["route"] else ""
        yield (
            f"{c['route']:<16} {c['score']:>10.4g} {c['p_slo']:>7.3f} {_ms(c['ttft']):>9} "
            f"{_ms(c['tpot']):>9} {c['quality']:>8.2f}{chosen}"
        )


def _middle(values: list[float]) -> float | None:
    return values[len(values) // 2] if values else None


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"
