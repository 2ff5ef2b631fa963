"""`sluice predict --text ...`: what the predictors say of one request, and why.

Length from the packaged or a given artifact; with a config, also what each replica would promise
when idle, and quality. Nothing is sent anywhere.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.cli import BAD_INPUT, DONE

if TYPE_CHECKING:
    from domain.length import LengthDistribution
    from predictors.length_gbdt import LengthGbdt

EXAMPLE = 'sluice predict --text "Write a poem about the sea" --model llama-3-8b'
SHOWN = 8
"""Reasons shown."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--text", help="the prompt; - reads standard input", required=True)
    parser.add_argument("--model", default="model", help="name of the model that would answer")
    parser.add_argument("--max-tokens", type=int, help="limit of the answer")
    parser.add_argument("--length", type=Path, help="a length artifact instead of the one shipped")
    parser.add_argument("--quality", type=Path, help="a quality artifact; shows P(good)")
    parser.add_argument("--prior", type=float, default=0.8, help="base rate of good answers")
    parser.add_argument("--median", type=float, help="median length of this model's answers so far")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Predict and show."""
    from domain.length import LengthDistribution
    from predictors.features import DENSE, PromptFacts, encode
    from predictors.learned import PACKAGED
    from predictors.length_gbdt import LengthGbdt
    from predictors.running import PRIOR

    if args.max_tokens is not None and args.max_tokens < 1:
        print(f"--max-tokens must be at least 1, not {args.max_tokens}", file=sys.stderr)
        return BAD_INPUT
    if args.median is not None and not 1 <= args.median <= 100_000:
        print(f"--median must lie in [1, 100000] tokens, not {args.median:g}", file=sys.stderr)
        return BAD_INPUT
    if not 0.0 < args.prior < 1.0:
        print(f"--prior must lie in (0, 1), not {args.prior:g}", file=sys.stderr)
        return BAD_INPUT
    text = sys.stdin.read() if args.text == "-" else args.text
    limit = None if args.max_tokens is None else float(args.max_tokens)
    features = encode(PromptFacts(text=text, max_tokens=limit))
    own = PRIOR if args.median is None else LengthDistribution.lognormal(args.median, 1.1)
    model = LengthGbdt.load(args.length or PACKAGED / "length.npz")
    forecast = model.predict(features, args.model, own)
    shown: dict[str, Any] = {
        "model": args.model,
        "length": _length(forecast, limit),
        "own": _length(own, limit),
        "known": model.knows(features),
        "version": model.version,
        "features": {n: round(v, 3) for n, v in zip(DENSE, features.tolist(), strict=False) if v},
        "reasons": reasons(model, features, args.model, own),
    }
    if args.quality is not None:
        from predictors.quality import QualityModel

        judge = QualityModel.load(args.quality)
        good = judge.predict(features, [args.model], [args.prior])[0]
        shown["quality"] = {"p_good": round(good, 4), "prior": args.prior, "version": judge.version}
    print(json.dumps(shown, indent=1) if args.json else _text(shown))
    return DONE


def _length(distribution: LengthDistribution, limit: float | None) -> dict[str, float]:
    levels = np.array([0.1, 0.5, 0.9])
    found = [float(q) for q in distribution.quantiles(levels)]
    mean = distribution.mean if limit is None else distribution.capped(limit).mean
    if limit is not None:
        found = [min(q, limit) for q in found]
        mean = min(mean, limit)
    low, middle, high = found
    return {"p10": round(low), "p50": round(middle), "p90": round(high), "mean": round(mean)}


def reasons(
    model: LengthGbdt, features: Any, name: str, own: LengthDistribution
) -> list[dict[str, float | str]]:
    """What moves the median most: for each number that is not zero, the median's factor against a
    request that is the same without it. Effects overlap, so they do not multiply to the whole.
    """
    from predictors.features import DENSE, DENSE_SIZE

    if not model.knows(features):
        return []
    scores = model.scores(features)
    whole = model.forecast(features, scores, name, own).quantile(0.5)
    found: list[dict[str, float | str]] = []
    for i in np.flatnonzero(features[:DENSE_SIZE]).tolist():
        without = features.copy()
        without[i] = 0.0
        other = model.forecast(without, model.scores(without), name, own).quantile(0.5)
        found.append(
            {"feature": DENSE[i], "value": float(features[i]), "factor": whole / max(other, 1.0)}
        )
    flat = features.copy()
    flat[DENSE_SIZE:] = 0.0
    other = model.forecast(flat, model.scores(flat), name, own).quantile(0.5)
    found.append({"feature": "words", "value": 1.0, "factor": whole / max(other, 1.0)})
    found.sort(key=lambda r: -abs(np.log(max(float(r["factor"]), 1e-9))))
    return found[:SHOWN]


def _text(shown: dict[str, Any]) -> str:
    length, own = shown["length"], shown["own"]
    spread = f"P10 {length['p10']}, P90 {length['p90']}, mean {length['mean']}"
    lines = [
        f"length of {shown['model']}'s answer: {length['p50']} tokens ({spread})",
        f"  without the prompt: {own['p50']} (P10 {own['p10']}, P90 {own['p90']})",
    ]
    if not shown["known"]:
        lines.append("  the prompt is unlike what the fit saw: the model's own distribution stands")
    if shown["reasons"]:
        lines.append("  what moves the median (factor against the same request without it):")
    lines += [
        f"    x{reason['factor']:.2f}  {reason['feature']} = {reason['value']:.3g}"
        for reason in shown["reasons"]
    ]
    if "quality" in shown:
        quality = shown["quality"]
        lines.append(f"P(good): {quality['p_good']:.3f} (base rate {quality['prior']:g})")
    return "\n".join([*lines, f"artifact {shown['version']}"])
