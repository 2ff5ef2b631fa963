"""What calibration is worth: fits, errors on what they have not seen, bars, in one report.

`sluice calibrate SOURCE` prints these; the figures of docs/calibration.md are theirs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey
from training import calibrate as steps_fit
from training import calibrate_tables as tables
from training.calibrate import Floats

if TYPE_CHECKING:
    from training import calibrate_e2e as loop_fit

Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A profile with what it was measured to be worth; `good` is within the bar."""

    name: str
    profile: Profile
    residuals: dict[str, float]
    good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A report: lines of a table with a header, sentences about it, whether every bar was met."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    summary: list[str]
    figures: dict[str, float]
    passed: bool
    profiles: list[Shipped]
    source: tables.Source

    def text(self) -> str:
        """For people."""
        cells = [self.header, *(tuple(map(_cell, row)) for row in self.rows)]
        widths = [max(len(row[k]) for row in cells) for k in range(len(self.header))]
        lines = [
            "  ".join(
                word.ljust(width) if k == 0 else word.rjust(width)
                for k, (word, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *lines, *self.summary])

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.header, row, strict=True)) for row in self.rows],
            "figures": self.figures,
            "passed": self.passed,
        }


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "" if value else "MISSED"
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


# ---- step tables


def steps(
    data: Path,
    file: Path | None = None,
    *,
    only: str | None = None,
    seed: int = 1,
    share: float = 0.25,
    progress: Progress = iter,
) -> Outcome:
    """Fit step tables, judged on left-out shapes; all three data sets without a file.

    Raises: ConfigError, FileNotFoundError for input that is wrong or absent.
    """
    sets = tables.every_set(data) if file is None else [(str(file), tables.read_table(file))]
    families = [
        (name, family) for name, some in sets for family in some if not only or only in family.name
    ]
    if not families:
        raise ConfigError(f"no family whose name contains {only!r}")
    fitted = [
        (name, steps_fit.fit_family(family, seed=seed, share=share))
        for name, family in progress(families)
    ]
    rows: list[tuple[Any, ...]] = [
        (
            f.name, f.unseen.steps, f.unseen.median, f.unseen.p90, f.seen.median, f.seen.p90,
            f.unseen.good,
        )
        for _, f in fitted
    ]  # fmt: skip
    summary, figures = [], {}
    for name in dict.fromkeys(name for name, _ in fitted):
        good = [f.unseen.good for n, f in fitted if n == name]
        summary.append(f"{name}: {sum(good)} of {len(good)} families within the bar")
        figures[name] = sum(good) / len(good)
    everything = float(np.mean([f.unseen.good for _, f in fitted]))
    figures["within_bar"] = everything
    bar = steps_fit.MEDIAN_BAR, steps_fit.P90_BAR
    summary.append(
        f"all: {100 * everything:.1f} % of {len(fitted)} families have a median within "
        f"{100 * bar[0]:.0f} % and a P90 within {100 * bar[1]:.0f} % on left-out shapes "
        f"(bar {100 * steps_fit.FAMILIES_BAR:.0f} %)"
    )
    only_set = {name for name, _ in fitted}
    own = tables.Source(str(file), "unstated")
    merged = tables.Source(
        "; ".join(tables.SETS[n].source for n in only_set if n in tables.SETS),
        "; ".join(tables.SETS[n].licence for n in only_set if n in tables.SETS),
    )
    return Outcome(
        title="step tables: relative errors of step times on shapes left out, and of the final fit",
        header=("family", "left out", "median", "P90", "median seen", "P90 seen", "bar"),
        rows=rows,
        summary=summary,
        figures=figures,
        passed=everything >= steps_fit.FAMILIES_BAR,
        profiles=[
            Shipped(
                name=f.name,
                profile=f.profile,
                residuals={"median": f.unseen.median, "p90": f.unseen.p90},
                good=f.unseen.good,
            )
            for _, f in fitted
        ],
        source=own if file is not None else merged,
    )


# ---- end-to-end points


def end_to_end(
    data: Path,
    file: Path | None = None,
    *,
    only: str | None = None,
    folds: int = 0,
    seed: int = 1,
    progress: Progress = iter,
) -> Outcome:
    """One model over all points, judged on configurations left out whole, each on its own or in
    `folds` groups; then fitted to all.

    Raises: ConfigError, FileNotFoundError for input that is wrong or absent.
    """
    from training import calibrate_e2e as loop_fit

    path = file or data / "engine_silicon_e2e" / "silicon_e2e.parquet"
    points = loop_fit.read_points(path)
    tpot, ttft = loop_fit.left_out_predictions(points, folds=folds, seed=seed, progress=progress)
    errors = np.stack([np.abs(tpot / points.tpot - 1), np.abs(ttft / points.ttft - 1)], 1)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, configuration in enumerate(points.configuration):
        groups.setdefault(configuration, []).append(i)
    rows: list[tuple[Any, ...]] = []
    for group, index in sorted(groups.items()):
        median = np.median(errors[index], axis=0)
        rows.append(
            (" ".join(group), len(index), float(median[0]), float(median[1]),
             bool(median[0] <= loop_fit.TPOT_BAR and median[1] <= loop_fit.TTFT_BAR))
        )  # fmt: skip
    medians = np.median(errors, axis=0)
    means = np.mean(errors, axis=0)
    model = loop_fit.ClosedLoop().fit(points)
    constants = model.constants(points)
    profiles = []
    for group, index in sorted(groups.items()):
        for gpus, ranks in sorted({(points.gpus[i], points.ranks[i]) for i in index}):
            some = [i for i in index if (points.gpus[i], points.ranks[i]) == (gpus, ranks)]
            found = _loop_profile(points, constants, errors, some, group)
            if not only or only in found.name:
                profiles.append(found)
    passed = bool(medians[0] <= loop_fit.TPOT_BAR and medians[1] <= loop_fit.TTFT_BAR)
    return Outcome(
        title="end-to-end points: median relative errors of configurations left out whole",
        header=("configuration", "points", "TPOT", "TTFT", "bar"),
        rows=rows,
        summary=[(
            f"all {len(points)} points: TPOT median {100 * medians[0]:.1f} % (bar "
            f"{100 * loop_fit.TPOT_BAR:.0f} %), mean {100 * means[0]:.1f} %; TTFT median "
            f"{100 * medians[1]:.1f} % (bar {100 * loop_fit.TTFT_BAR:.0f} %), mean "
            f"{100 * means[1]:.1f} %"
        )],
        figures={
            "tpot": float(medians[0]), "ttft": float(medians[1]),
            "tpot_mean": float(means[0]), "ttft_mean": float(means[1]),
        },
        passed=passed,
        profiles=profiles,
        source=loop_fit.POINTS if file is None else tables.Source(str(file), "unstated"),
    )  # fmt: skip


def _loop_profile(
    points: loop_fit.Points,
    constants: Floats,
    errors: Floats,
    index: Sequence[int],
    group: Sequence[str],
) -> Shipped:
    from training import calibrate_e2e as loop_fit

    system, backend, model, precision = group
    first = index[0]
    median = np.median(errors[list(index)], axis=0)
    profile = loop_fit.profile_of(constants, points, first, float(np.clip(median[1], 0.1, 1.0)))
    name = f"{system}-{backend}-{tables.short(model)}-{precision}-tp{int(points.gpus[first])}"
    if points.ranks[first] > 1:
        name += f"-dp{int(points.ranks[first])}"
    return Shipped(
        name=f"e2e-{name}",
        profile=profile,
        residuals={"tpot_median": float(median[0]), "ttft_median": float(median[1])},
        good=bool(median[0] <= loop_fit.TPOT_BAR and median[1] <= loop_fit.TTFT_BAR),
    )


# ---- runs of requests


def runs(data: Path, *, plots: Path | None = None, progress: Progress = iter) -> Outcome:
    """Each run of `engine_vllm_request_logs`: constants from its first 20 %, the rest predicted.

    `plots` is a folder for the queue, measured and predicted, of every run as CSV.
    Raises: FileNotFoundError that says where it looked.
    """
    from training import calibrate_runs as runs_fit  # compiles the physics

    rows: list[tuple[Any, ...]] = []
    profiles: list[Shipped] = []
    figures: dict[str, float] = {}
    for run, start in progress(runs_fit.vllm_runs(data)):
        n = len(run.at)
        seen = np.arange(n) < round(runs_fit.SEEN * n)
        fitted = runs_fit.fit_runs([run], [seen], start)
        profile, lived = fitted.profile, runs_fit.live(fitted, run)
        ttft, e2e = runs_fit.median_errors(lived, run, ~seen)
        before = runs_fit.median_errors(lived, run, seen)
        at = np.linspace(0.0, float((run.at + run.e2e).max()), 200)
        measured, predicted = waiting(run.at, run.ttft, at), waiting(run.at, lived.ttft, at)
        off = float(np.abs(measured - predicted).mean() / max(measured.mean(), 1e-9))
        good = ttft <= runs_fit.BAR and e2e <= runs_fit.BAR
        rows.append((run.name, int(n - seen.sum()), ttft, e2e, before[0], before[1], off, good))
        figures |= {f"{run.name} ttft": ttft, f"{run.name} e2e": e2e, f"{run.name} queue": off}
        key = profile.key
        profiles.append(
            Shipped(
                name=f"{key.gpu}-vllm-{tables.short(key.model)}-bf16-tp{key.tp}-requests",
                profile=replace(profile, uncertainty=max(0.05, ttft)),
                residuals={"ttft_median": ttft, "e2e_median": e2e},
                good=good,
            )
        )
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            name = f"queue-{key.gpu}-{tables.short(key.model)}.csv"
            with (plots / name).open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(("t_s", "waiting_measured", "waiting_predicted"))
                table.writerows(
                    (f"{t:.2f}", int(m), int(p))
                    for t, m, p in zip(at, measured, predicted, strict=True)
                )
    return Outcome(
        title="runs of vLLM: constants from the first 20 % of a run's requests, the rest predicted",
        header=("run", "predicted", "TTFT", "E2E", "TTFT seen", "E2E seen", "queue", "bar"),
        rows=rows,
        summary=[
            (
                f"median relative errors, bar {100 * runs_fit.BAR:.0f} % each; queue: mean "
                "absolute difference of the waiting counts over the mean of the measured"
            )
        ],
        figures=figures,
        passed=all(row[-1] for row in rows),
        profiles=profiles,
        source=runs_fit.REQUEST_LOGS,
    )


def waiting(arrived: Floats, ttft: Floats, at: Floats) -> Floats:
    """How many requests have come but given no token yet, at those times (k,)."""
    came = np.searchsorted(np.sort(arrived), at, side="right")
    out: Floats = (came - np.searchsorted(np.sort(arrived + ttft), at, side="right")).astype(float)
    return out


# ---- decision logs


def decision_logs(
    files: Sequence[Path],
    *,
    key: ProfileKey,
    only: str | None = None,
    chunk: int = 64,
    max_seqs: int = 4,
    progress: Progress = iter,
) -> Outcome:
    """A profile per replica of one or more decision logs (each its own run): fitted to the first
    half of every log, judged on the second, then to all.

    Raises: ConfigError naming the file that is absent or holds nothing usable.
    """
    from training import calibrate_runs as runs_fit  # compiles the physics

    logs = [(path, runs_fit.from_decisions(_records(path), str(path))) for path in files]
    names = sorted({name for _, some in logs for name in some if only in {None, name}})
    if not names:
        known = sorted({name for _, some in logs for name in some})
        raise ConfigError(f"no replica {only!r} in the log; known: {', '.join(known)}")
    start = Profile(
        key=key,
        overhead=0.001,
        weights=0.01,
        per_sequence=0.002,
        per_context=1e-6,
        per_token=0.002,
        per_attention=1e-7,
        chunk=chunk,
        max_seqs=max_seqs,
        kv_capacity=1e5,
        max_context=8192,
    )
    rows: list[tuple[Any, ...]] = []
    profiles: list[Shipped] = []
    figures: dict[str, float] = {}
    title = f"{key.gpu}-{key.engine}-{tables.short(key.model)}-{key.precision}"
    for name in progress(names):
        some = [log[name] for _, log in logs if name in log and len(log[name].at) >= 10]
        if not some:
            raise ConfigError(f"replica {name!r}: no log with 10 requests or more")
        early = [np.arange(len(run.at)) < len(run.at) // 2 for run in some]
        guess = runs_fit.fit_runs(some, early, start, priors=runs_fit.WIDE)
        errors = [
            runs_fit.median_errors(runs_fit.live(guess, run), run, ~seen)
            for run, seen in zip(some, early, strict=True)
        ]
        ttft, e2e = (float(x) for x in np.median(np.array(errors), axis=0))
        every = [np.ones(len(run.at), np.bool_) for run in some]
        profile, delay = runs_fit.fit_runs(some, every, guess.profile)
        count = int(sum((~seen).sum() for seen in early))
        good = ttft <= 0.25 and e2e <= 0.25
        rows.append((name, count, ttft, e2e, good))
        figures |= {f"{name} ttft": ttft, f"{name} e2e": e2e, f"{name} delay": delay}
        profiles.append(
            Shipped(
                name=title if len(names) == 1 else name,
                profile=replace(profile, uncertainty=float(np.clip(ttft, 0.05, 1.0))),
                residuals={"ttft_median": ttft, "e2e_median": e2e},
                good=good,
            )
        )
    return Outcome(
        title="decision logs: fitted to the first half of each, the second predicted",
        header=("replica", "predicted", "TTFT", "E2E", "bar"),
        rows=rows,
        summary=["median relative errors by log, their median; 25 % is called good"],
        figures=figures,
        passed=all(row[-1] for row in rows),
        profiles=profiles,
        source=tables.Source(
            f"decision logs of a gateway ({len(files)} files)", "unstated; pass --licence"
        ),
    )


def _records(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as exc:
            if number == len(lines):
                return  # cut short by a crash
            raise ConfigError(f"{path}: line {number} is no JSON") from exc
        if isinstance(record, dict):
            yield record
