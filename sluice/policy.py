"""`sluice policy`: the registry of policies, and who decides.

It works on the registry's folder; gateways whose config names that folder follow within a second.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from domain.errors import ConfigError
from policies import registry
from sluice.cli import DONE

EXAMPLE = (
    'sluice policy add gentle --kind linear --set \'weights={"p_slo": 1, "cost": -0.05}\'\n'
    "  sluice policy shadow gentle\n"
    "  sluice policy promote        # 1 %, then 5, 25, 100 %, then active\n"
    "  sluice policy rollback"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--registry",
        type=Path,
        default=Path(".sluice/policies"),
        metavar="FOLDER",
        help="the registry (`policy_registry` in the config)",
    )
    parser.add_argument("--json", action="store_true", help="print values as JSON")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("list", help="entries, and which of them decides or is tried")
    show = verbs.add_parser("show", help="an entry, checked; without a name: what happened so far")
    show.add_argument("name", nargs="?")
    add = verbs.add_parser("add", help="put a policy into the registry")
    add.add_argument("name")
    source = add.add_mutually_exclusive_group(required=True)
    source.add_argument("--kind", help="kind of the policy")
    source.add_argument("--file", type=Path, help="a policy as JSON, or an entry")
    add.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the policy; the value as JSON; repeat for more",
    )
    add.add_argument("--note", default="", help="a line for the card")
    shadow = verbs.add_parser("shadow", help="let an entry score beside the active policy")
    shadow.add_argument("name")
    promote = verbs.add_parser("promote", help="the next stage: 1, 5, 25, 100 %%, active")
    promote.add_argument("--share", type=float, help="another share of the tenants, in percent")
    promote.add_argument(
        "--by-session",
        action="store_true",
        help="draw sessions instead of tenants, where one tenant is all there is",
    )
    rollback = verbs.add_parser("rollback", help="end the trial, else go back to the policy before")
    rollback.add_argument("--note", default="", help="why")


def run(args: Namespace) -> int:
    """Do it and say what holds now."""
    folder, verb = args.registry, args.verb
    match verb:
        case "list":
            _say(args, _listed(folder))
        case "show" if args.name is None:
            state = registry.read_state(folder)
            _say(args, [step.model_dump() for step in state.history])
        case "show":
            entry = registry.read_entry(folder, args.name)
            registry.probe(entry.policy)
            print(json.dumps(entry.model_dump(mode="json"), indent=1))
        case "add":
            from policies.factory import resolved

            entry = registry.entry_of(args.name, resolved(_policy(args)), _card(args))
            registry.probe(entry.policy)
            path = registry.write_entry(folder, entry)
            _say(args, [{"entry": entry.name, "hash": entry.hash[:12], "file": str(path)}])
        case "shadow":
            registry.probe(registry.read_entry(folder, args.name).policy)
            change = partial(registry.shadowed, name=args.name, at=time.time())
            _changed(args, registry.change_state(folder, change))
        case "promote":
            _changed(args, registry.change_state(folder, partial(_promote, args)))
        case "rollback":
            change = partial(registry.rolled_back, at=time.time(), detail=args.note)
            _changed(args, registry.change_state(folder, change))
    return DONE


def _promote(args: Namespace, state: registry.Registry) -> registry.Registry:
    share = None if args.share is None else args.share / 100.0
    if share is not None and not 0.0 < share <= 1.0:
        raise ConfigError(f"--share must lie in (0, 100] percent, not {args.share:g}")
    if state.trial is not None:
        registry.read_entry(args.registry, state.trial)
    if args.by_session:
        state = state.model_copy(update={"unit": "session"})
    return registry.promoted(state, time.time(), share)


def _policy(args: Namespace) -> Any:
    """The policy that the arguments describe. Raises: ConfigError."""
    from pydantic import TypeAdapter, ValidationError

    from policies.config import PolicyConfig

    options: dict[str, Any] = {"kind": args.kind}
    if args.file is not None:
        try:
            found = json.loads(args.file.read_text())
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{args.file}: {exc}") from exc
        options = found.get("policy", found) if isinstance(found, dict) else {}
    for word in args.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, not {word!r}")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    adapter: TypeAdapter[Any] = TypeAdapter(PolicyConfig)
    try:
        return adapter.validate_python(options)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "policy"
        raise ConfigError(f"{where}: {first['msg']}") from exc


def _card(args: Namespace) -> dict[str, Any]:
    card: dict[str, Any] = {"added": time.time()}
    if args.file is not None:
        found = json.loads(args.file.read_text())
        card |= found.get("card", {}) if isinstance(found, dict) else {}
    return card | ({"note": args.note} if args.note else {})


def _listed(folder: Path) -> list[dict[str, Any]]:
    state, rows = registry.read_state(folder), []
    for name in registry.names(folder):
        row: dict[str, Any] = {"name": name, "kind": "", "hash": "", "role": ""}
        if name == state.active:
            row["role"] = "active"
        elif name == state.trial:
            share = state.share
            row["role"] = "shadow" if share is None else f"canary {100 * share:g} %"
        try:
            entry = registry.read_entry(folder, name)
            row |= {"kind": entry.policy.kind, "hash": entry.hash[:12]}
        except ConfigError as exc:
            row["role"] = f"unusable: {exc}"
        rows.append(row)
    if state.active is None:
        rows.append({"name": "(config)", "kind": "", "hash": "", "role": "active"})
    return rows


def _changed(args: Namespace, state: registry.Registry) -> None:
    tried = state.trial
    if tried is not None:
        share = state.share
        tried += " in shadow" if share is None else f" for {100 * share:g} % of the {state.unit}s"
    if args.json:
        print(state.model_dump_json())
    else:
        print(f"active: {state.active or 'the policy of the config'}\ntried: {tried or 'nothing'}")


def _say(args: Namespace, rows: list[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps(rows))
        return
    if not rows:
        print("nothing yet", file=sys.stderr)
        return
    widths = {k: max(len(k), *(len(str(r[k])) for r in rows)) for k in rows[0]}
    print("  ".join(k.ljust(w) for k, w in widths.items()).rstrip())
    for row in rows:
        print("  ".join(str(row[k]).ljust(w) for k, w in widths.items()).rstrip())
