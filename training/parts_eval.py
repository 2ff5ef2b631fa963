"""How well thinking and answer are forecast apart: ServeGen's clients of a reasoning model.

    python -m training.parts_eval --data ../shared/data

Prequential: each output is forecast from those before it, then observed. Compared are the single
hazard of the whole (`predictors.running` with its conformal correction) and the two hazards of
`predictors.parts`: the whole as their sum, each part, and what is left when the thinking ends,
where the single hazard knows only that so many tokens have come.

The data give no outputs but quantiles of their length and of the share that is thinking, per client
and six hours, so outputs are drawn from these. How the two hang together within a client is not
published: `--link` is the correlation of a Gaussian copula between them, 0 by default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from domain.length import EDGES, LengthDistribution
from predictors.conformal import RollingConformal, corrected
from predictors.parts import PartLengths
from predictors.running import RunningLengths
from training.dataset import data_folder
from training.length_eval import LEVELS, TARGET, Floats, Ints, pinball
from training.trace_sources import SERVEGEN_LEVELS, columns

WORKLOAD = "deepseek-r1"
PERIOD = 21_600.0
"""Seconds that one length profile covers."""


class Outputs(NamedTuple):
    """n outputs in the order in which they came: client, tokens of the whole and of thinking."""

    client: Ints
    whole: Floats
    thought: Floats


def draw(data: Path, count: int, link: float, seed: int) -> Outputs:
    """About `count` outputs of ServeGen's reasoning clients over a day, by the clients' rates."""
    rng = np.random.default_rng(seed)
    profiles = columns(data / "servegen" / "client_lengths.parquet")
    rates = columns(data / "servegen" / "client_rates.parquet")
    mine = rates["workload"] == WORKLOAD
    client, rate = rates["client"][mine].astype(np.int64), rates["rate_rps"][mine]
    period = rates["window_start_s"][mine] // PERIOD
    parts: list[Outputs] = []
    for at in np.unique(period).tolist():
        drawn: list[Floats] = []
        for name in np.unique(client).tolist():
            here = (client == name) & (period == at)
            n = rng.poisson(count * rate[here].sum() / rate.sum())
            both = [
                _profile(profiles, name, field, at * PERIOD)
                for field in ("output_tokens", "reason_ratio")
            ]
            if n == 0 or both[0] is None or both[1] is None:
                continue
            z = rng.standard_normal((2, n))
            z[1] = link * z[0] + np.sqrt(1.0 - link**2) * z[1]
            levels = np.vectorize(NormalDist().cdf)(z)
            whole = np.maximum(np.interp(levels[0], SERVEGEN_LEVELS, both[0]).round(), 1.0)
            thought = (whole * np.interp(levels[1], SERVEGEN_LEVELS, both[1])).round()
            drawn.append(np.stack([np.full(n, float(name)), whole, thought]))
        rows = rng.permutation(np.concatenate(drawn, axis=1), axis=1)
        parts.append(Outputs(rows[0].astype(np.int64), rows[1], rows[2]))
    return Outputs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _profile(profiles: Any, client: int, field: str, at: float) -> Floats | None:
    """Quantiles of a client's field in force at a time; None where it has none."""
    mine = (profiles["workload"] == WORKLOAD) & (profiles["client"] == client)
    mine &= profiles["field"] == field
    rows = np.flatnonzero(mine)
    if not len(rows):
        return None
    begun = rows[profiles["window_start_s"][rows] <= at]
    row = begun[-1] if len(begun) else rows[0]
    return np.asarray(profiles["quantiles"][row], np.float64)


def summed(
    first: LengthDistribution, lengths: PartLengths, model: str, group: int
) -> LengthDistribution:
    """The whole as the sum of both parts: a mixture over the quantiles of the first."""
    places = first.quantiles((np.arange(32) + 0.5) / 32)
    whole = np.zeros(len(EDGES))
    for place in places.tolist():
        answer = lengths.answer(model, group, place)
        whole += np.interp(EDGES - (place - 1.0), EDGES, answer.survival, left=1.0) / len(places)
    whole[0], whole[-1] = 1.0, 0.0
    return LengthDistribution(np.minimum.accumulate(whole))


class Kept(NamedTuple):
    """Quantiles at `LEVELS` of one rival and what came, with the rank of what came."""

    quantiles: list[Floats]
    came: list[float]
    rank: list[float]

    def add(self, forecast: LengthDistribution, came: float, gone: float = 0.0) -> None:
        """Forecast of a length of which `gone` tokens are over, `came` what was left of it."""
        self.quantiles.append(np.maximum(forecast.quantiles(LEVELS) - gone, 0.0))
        self.came.append(came)
        self.rank.append(1.0 - forecast.survives(came + gone))

    def scores(self) -> dict[str, float]:
        """Pinball loss (tokens) and the share at or below the P90."""
        loss = pinball(np.array(self.quantiles), LEVELS, np.array(self.came))
        covered = float((np.array(self.rank) <= TARGET).mean())
        return {"answers": len(self.came), "pinball": float(loss.mean()), "p90": covered}


def evaluate(outputs: Outputs, *, skip: int = 500, every: int = 5) -> dict[str, dict[str, float]]:
    """Scores of every rival; the first `skip` outputs only teach, the sum is formed for one output
    in `every`.
    """
    parts, single, own = PartLengths(), RunningLengths(), RunningLengths()
    levels = RollingConformal(target=TARGET)
    kept = {
        name: Kept([], [], [])
        for name in (
            "whole: single hazard", "whole: sum of parts", "thinking", "answer",
            "left at the boundary: single hazard", "left at the boundary: answer's own",
            "left at the boundary: answer given thinking",
        )
    }  # fmt: skip
    rows = zip(*(column.tolist() for column in outputs), strict=True)
    for i, (client, whole, thought) in enumerate(rows):
        group = client + 1  # 0 is the model as a whole
        first = thought + 1.0 if thought < whole else None
        if i >= skip and parts.thinks(WORKLOAD):
            alone = single.distribution(WORKLOAD, group)
            alone = corrected(alone, levels.level(WORKLOAD, str(group)))
            if i % every == 0:
                begun = parts.first(WORKLOAD, group)
                kept["whole: single hazard"].add(alone, whole)
                kept["whole: sum of parts"].add(summed(begun, parts, WORKLOAD, group), whole)
            if first is not None:
                given = parts.answer(WORKLOAD, group, first)
                kept["thinking"].add(parts.first(WORKLOAD, group), first)
                kept["answer"].add(given, whole - thought)
                left = whole - first
                kept["left at the boundary: single hazard"].add(alone.remaining(first), left)
                any_answer = own.distribution(WORKLOAD, group)
                kept["left at the boundary: answer's own"].add(any_answer, left, 1.0)
                kept["left at the boundary: answer given thinking"].add(given, left, 1.0)
        rank = 1.0 - single.distribution(WORKLOAD, group).survives(whole)
        levels.observe(WORKLOAD, str(group), rank)
        single.observe(WORKLOAD, group, whole)
        if first is not None:
            own.observe(WORKLOAD, group, whole - thought)
        parts.observe(WORKLOAD, group, first, whole)
    return {name: rival.scores() for name, rival in kept.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and print the table as JSON; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="training.parts_eval", description=__doc__)
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--outputs", type=int, default=12_000)
    parser.add_argument("--link", type=float, nargs="*", default=[0.0], help="in (-1, 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for link in args.link:
        outputs = draw(data_folder(args.data), args.outputs, link, args.seed)
        print(json.dumps({"link": link, "seed": args.seed, "scores": evaluate(outputs)}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
