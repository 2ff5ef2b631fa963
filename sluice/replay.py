"""`sluice replay`: open-loop load from a trace, a Poisson rate or a decision log."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domain.errors import ConfigError
from domain.request import Slo
from sluice.cli import DONE, FAILED

if TYPE_CHECKING:
    from training.replay import ClassPlan, Result
    from training.traces import Trace

EXAMPLE = r"""sluice replay -c configs/local.yaml --trace azure_code --count 500 --rate 1.5 \
      --divide 16 --max-prompt 512 --max-output 128 --class interactive
  sluice replay --url http://127.0.0.1:8080 --poisson --rate 2 --count 100 --slo ttft=1000"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8080", help="base URL, with or without /v1"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="NAME", help="a data set, e.g. azure_code, mooncake")
    source.add_argument(
        "--poisson", action="store_true", help="Poisson arrivals, log-normal lengths"
    )
    source.add_argument("--log", type=Path, metavar="FILE", help="a decision log (JSONL)")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--count", type=int, help="requests to send, from the start of the source")
    parser.add_argument("--skip", type=int, default=0, help="requests to leave out at its start")
    parser.add_argument(
        "--rate", type=float, help="requests/s; the source's time is stretched to it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn")
    parser.add_argument("--divide", type=float, default=1.0, help="divide lengths by this")
    parser.add_argument("--min-tokens", type=int, default=8, help="shortest length after dividing")
    parser.add_argument("--max-prompt", type=int, help="cap of prompts, tokens")
    parser.add_argument("--max-output", type=int, help="cap of answers, tokens")
    parser.add_argument(
        "--prompt", type=int, default=128, help="median prompt of --poisson, tokens"
    )
    parser.add_argument("--output", type=int, default=32, help="median answer of --poisson, tokens")
    parser.add_argument("-c", "--config", type=Path, help="gateway config: classes' limits")
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="NAME[=SHARE]",
        help="class to ask for; repeat for a mix",
    )
    parser.add_argument("--key", help="API key; else $SLUICE_KEY")
    parser.add_argument(
        "--slo", metavar="ttft=MS,tpot=MS,e2e=MS", help="limits, instead of a class's"
    )
    parser.add_argument("--model", default="auto", help="model to ask for")
    parser.add_argument("--no-stream", action="store_true", help="ask for answers in one piece")
    parser.add_argument(
        "--length-field",
        default="max_tokens",
        choices=["max_tokens", "max_completion_tokens", "n_predict"],
        help="field that carries the answer's length; n_predict hides it from the gateway",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="answers get their full length")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take")
    parser.add_argument("--out", type=Path, metavar="FILE", help="one JSON line a request")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: Namespace) -> int:
    """Send, wait, report."""
    from backends.upstream import Timeouts
    from training.replay import Options, Replay
    from training.replay_report import summary

    plan = plan_of(args)
    classes, keys = judged(args, plan)
    options = Options(
        model=args.model,
        stream=not args.no_stream,
        length_field=args.length_field,
        ignore_eos=args.ignore_eos,
        timeouts=Timeouts(connect=10.0, first_token=None, between_tokens=None, total=args.timeout),
    )
    results = _watched(
        lambda progress: Replay(
            plan,
            args.url,
            options=options,
            classes=classes,
            keys=keys,
            seed=args.seed,
            on_progress=progress,
        ),
        len(plan),
        show=not args.json and sys.stderr.isatty(),
    )
    report = summary(results, classes, stream=options.stream)
    if args.out is not None:
        with args.out.open("w") as out:
            out.writelines(json.dumps(asdict(r)) + "\n" for r in results)
    print(json.dumps(report) if args.json else "\n".join(told(report)))
    return DONE if any(r.finished for r in results) else FAILED


def plan_of(args: Namespace) -> Trace:
    """What is sent and when. Raises: ConfigError for a source that cannot be read."""
    import numpy as np

    from training import trace_sources, traces
    from training.replay import from_decision_log

    if args.count is not None and args.count < 1:
        raise ConfigError(f"--count must be at least 1, not {args.count}")
    rng = np.random.default_rng(args.seed)
    try:
        if args.trace is not None:
            data = args.data or trace_sources.default_data()
            plan = trace_sources.load(args.trace, data, rng)
        elif args.log is not None:
            plan = from_decision_log(args.log)
        else:
            count = args.count or 100
            plan = traces.synthetic(
                count, args.rate or 1.0, rng, cv=1.0, prompt_median=args.prompt,
                output_median=args.output, prompt_sigma=0.6, output_sigma=0.6,
            )  # fmt: skip
        keep = np.arange(len(plan))[args.skip :][: args.count]
        plan = traces.rows(plan, keep)
        plan = traces.scaled(
            plan,
            divide=args.divide,
            minimum=args.min_tokens,
            max_prompt=args.max_prompt,
            max_output=args.max_output,
        )
        if args.rate is not None:
            plan = traces.at_rate(plan, args.rate)
        if args.classes:
            plan = traces.with_classes(plan, dict(map(_share, args.classes)), rng)
    except (OSError, ValueError) as exc:
        raise ConfigError(str(exc)) from exc
    return plan


def judged(args: Namespace, plan: Trace) -> tuple[dict[str, ClassPlan], dict[str, str]]:
    """Limits by class, and API keys by tenant."""
    from training.replay import ClassPlan

    classes: dict[str, ClassPlan] = {name: ClassPlan() for name in plan.classes}
    key = args.key or os.environ.get("SLUICE_KEY", "")
    keys = {"": key} if key else {}
    if args.config is not None:
        from sluice.settings import load

        settings = load(args.config)
        for name in plan.classes:
            known = settings.classes.get(name)
            if known is not None:
                classes[name] = ClassPlan(slo=known.slo_class(name).slo, header=name)
            elif args.classes:
                raise ConfigError(
                    f"unknown class {name!r}; known: {', '.join(sorted(settings.classes))}"
                )
            else:
                own = settings.classes[settings.default_class]
                classes[name] = ClassPlan(slo=own.slo_class(settings.default_class).slo)
    elif args.classes:
        classes = {name: ClassPlan(header=name) for name in plan.classes}
    if args.slo is not None:
        slo = slo_of(args.slo)
        classes = {name: replace(c, slo=slo) for name, c in classes.items()}
    return classes, keys


def told(report: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    lines = [
        "{requests} requests at {rate:.2f}/s, {quota_refused} refused by quota".format_map(report),
        (
            f"goodput {report['goodput']:.3f}/s   attainment {100 * report['attainment']:.1f} %   "
            f"by work {100 * report['attainment_by_work']:.1f} %   "
            f"{report['tokens_per_second']:.0f} tokens/s"
        ),
        "",
        f"{'':<12}{'mean':>9}{'P50':>9}{'P90':>9}{'P99':>9}   ms",
    ]
    for name in ("ttft", "tpot", "tbt", "e2e", "normalised", "client_late"):
        spread = report[name]
        if spread is not None:
            figures = "".join(f"{1000 * spread[k]:>9.1f}" for k in ("mean", "p50", "p90", "p99"))
            lines.append(f"{name:<12}{figures}")
    for title in ("by_class", "by_tenant", "by_prompt_quartile"):
        groups = report[title]
        if len(groups) > 1:
            told_groups = ", ".join(
                f"{name} {100 * g['attainment']:.1f} % of {g['n']:.0f}"
                for name, g in groups.items()
            )
            lines.append(f"{title.replace('_', ' ')}: {told_groups}")
    if report["shares"]:
        shares = ", ".join(f"{name} {100 * s:.0f} %" for name, s in report["shares"].items())
        lines.append(f"replicas: {shares}")
    if report["errors"]:
        lines.append("errors: " + ", ".join(f"{n} x {e}" for e, n in report["errors"].items()))
    found = report["predictions"]
    if found is not None:
        lines.append(
            f"P(SLO): Brier {found['brier']:.4f} against {found['brier_base_rate']:.4f} of the "
            f"base rate; mean {found['mean_p']:.2f}, came true {found['mean_met']:.2f}"
        )
    return lines


def _watched(make: Any, total: int, *, show: bool) -> list[Result]:
    """Run a replay, with a progress bar if somebody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from sluice.assembly import run_loop

    found: list[Result] = []
    columns = ("sent {task.fields[sent]}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not show, refresh_per_second=4) as bar:
        task = bar.add_task("", total=total, sent=0)

        async def go() -> None:
            replaying = make(lambda sent, over: bar.update(task, completed=over, sent=sent))
            found.extend(await replaying.run())

        run_loop(go())
    return found


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share) if share else 1.0
    except ValueError as exc:
        raise ConfigError(f"--class takes NAME or NAME=SHARE, not {text!r}") from exc


def slo_of(text: str) -> Slo:
    """Limits from `ttft=MS,tpot=MS,e2e=MS`. Raises: ConfigError."""
    limits = dict.fromkeys(("ttft", "tpot", "e2e"), "")
    limits |= {name: value for name, _, value in (p.partition("=") for p in text.split(","))}
    try:
        seconds = {name: float(value) / 1000 for name, value in limits.items() if value}
        return Slo(**seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"--slo takes ttft=MS,tpot=MS,e2e=MS, not {text!r}") from exc
