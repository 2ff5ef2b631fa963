"""Fit the length model: `sluice train length`.

    python -m training.fit_length --data ../shared/data --out length.npz --report report

Reads answers (public sets, decision logs or both), holds out prompts and models, fits kernel scores
and the hazard trees, writes the artifact with its card, and says how good it is beside two trivial
predictors (the model's own running distribution) and the ceiling (the other models' lengths on the
same prompt).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predictors.artifact import Artifact, save
from predictors.features import DENSE, SCHEMA_HASH
from predictors.length_gbdt import KIND, LengthGbdt
from predictors.text import TextEncoder
from training.dataset import (
    SHIPPABLE,
    Answers,
    Split,
    data_folder,
    join,
    load_lengths,
    read_decision_logs,
    split,
    split_by_time,
)
from training.hazard import FitConfig, fit
from training.length_eval import evaluate, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; 0 when the artifact was written, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="sluice train length", description=__doc__)
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument(
        "--sets", nargs="*", help="sets to use; default all, 'ship' those that may be released"
    )
    parser.add_argument(
        "--logs", nargs="*", type=Path, default=[], help="decision logs, JSON lines"
    )
    parser.add_argument("--by-time", action="store_true", help="hold out the latest 30 %% instead")
    parser.add_argument("--leave-out", default="", help="a set never trained on, only tested")
    parser.add_argument("--out", type=Path, default=Path("length.npz"))
    parser.add_argument("--report", type=Path, help="folder for report.json and report.html")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-test", action="store_true", help="train on every prompt, skip the report"
    )
    args = parser.parse_args(argv)
    started = time.perf_counter()
    answers = read_answers(args.data, args.sets, args.logs, logs_only=args.by_time)
    parts = split_by_time(answers) if args.by_time else split(answers)
    if args.no_test:
        parts = Split(np.ones(len(answers), bool), parts.test & False, parts.unseen & False)
    if args.leave_out:
        out = answers.dataset == args.leave_out
        parts = Split(parts.train & ~out, parts.test | (out & ~parts.unseen), parts.unseen)
    text = TextEncoder.packaged()
    artifact, health = fit(answers, parts, text, FitConfig(seed=args.seed))
    report: dict[str, Any] = {}
    if not args.no_test:
        report = evaluate(LengthGbdt(artifact), answers, parts)
    card = {
        **artifact.card,
        "sources": sorted(np.unique(answers.dataset).tolist()),
        "shippable": bool(np.isin(answers.dataset, SHIPPABLE).all()),
        "answers": int(parts.train.sum()),
        "prompts": len(np.unique(answers.prompt[parts.train])),
        "models": len(np.unique(answers.model[parts.train])),
        "split": "by time" if args.by_time else "by prompt and model, sha256 salt sluice-1",
        "left_out": args.leave_out,
        "features": list(DENSE),
        "health": health,
        "scores": report.get("sets", {}),
        "seconds": round(time.perf_counter() - started, 1),
    }
    artifact = Artifact(kind=KIND, arrays=artifact.arrays, schema=SCHEMA_HASH, card=card)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(artifact, args.out)
    if args.report:
        write_report(args.report, {"card": card, **report})
    print(json.dumps({"out": str(args.out), "version": artifact.version, **card}, indent=1))
    return 0


def read_answers(
    folder: str | None, sets: Sequence[str] | None, logs: Sequence[Path], *, logs_only: bool
) -> Answers:
    """Public sets and decision logs in one frame."""
    parts = [read_decision_logs(logs)] if logs else []
    if not (logs_only and logs):
        names = list(SHIPPABLE) if sets == ["ship"] else sets
        parts.append(load_lengths(data_folder(folder), names))
    return join(parts)


if __name__ == "__main__":
    sys.exit(main())
