"""The registry of policies: a folder with a readable file an entry, and one that says who decides.

    entries/NAME.json   a policy's kind, options and parameters, its card, and a hash over them
    state.json          which entry is active, which is tried and how, and what happened before

An entry is data: nothing in it is run. Its hash is checked, its parameters must be finite and in
their ranges, and the scorer they make must give numbers on a small made-up fleet, or it is refused.
State changes under a lock and by renaming, so several gateways and people may share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from domain.errors import ConfigError
from policies.config import PolicyConfig, TrialConfig

FORMAT = 1
SHIPPED = Path(__file__).parent / "artifacts"
"""Registry of what comes with the package."""
STAGES = (0.01, 0.05, 0.25, 1.0)
"""Shares of the tenants, one promotion after another."""
HISTORY = 200
"""Steps that the state remembers."""
MAX_BYTES = 8 << 20
"""A larger entry is refused unread."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_policy: TypeAdapter[Any] = TypeAdapter(PolicyConfig)


class EntryError(ConfigError):
    """An entry that cannot be used; the message says why and what to do."""


class Entry(BaseModel):
    """One policy with what is known of it; `card` holds plain values for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    name: str
    policy: PolicyConfig
    card: dict[str, Any] = {}
    hash: str


class Step(BaseModel):
    """Something that happened. `at` in Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float
    verb: Literal["shadow", "promote", "activate", "rollback", "rolled back"]
    name: str | None
    detail: str = ""


class Registry(BaseModel):
    """Who decides. `active` None: the policy of the config file. `trial` names the entry that is
    tried, `share` None in shadow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    active: str | None = None
    previous: tuple[str | None, ...] = ()
    trial: str | None = None
    share: float | None = Field(default=None, ge=0.0, le=1.0)
    unit: Literal["tenant", "session"] = "tenant"
    salt: str = ""
    serial: int = 0
    """Counts changes, so that a trial that begins again begins anew."""
    history: tuple[Step, ...] = ()


def digest(policy: PolicyConfig) -> str:
    """SHA-256 over the policy's canonical JSON."""
    text = json.dumps(policy.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entry_of(name: str, policy: PolicyConfig, card: dict[str, Any] | None = None) -> Entry:
    """An entry with its hash. Raises: EntryError for a name that is none."""
    if not _NAME.fullmatch(name):
        raise EntryError(f"{name!r} is no name: letters, digits, '.', '_' and '-', at most 64")
    return Entry(name=name, policy=policy, card=card or {}, hash=digest(policy))


def write_entry(folder: Path, entry: Entry) -> Path:
    """Put an entry into the registry; an older one of its name is replaced."""
    path = _path(folder, entry.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(entry.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")
    return path


def read_entry(folder: Path, name: str) -> Entry:
    """An entry, checked.

    Raises: EntryError when it is missing, damaged, changed by hand, or its parameters are not
    finite or out of range.
    """
    if not _NAME.fullmatch(name):
        raise EntryError(f"{name!r} is no name of an entry")
    path = _path(folder, name)
    if not path.exists():
        raise EntryError(f"no entry {name!r} in {folder}; known: {known(folder)}")
    entry = read_file(path)
    if entry.name != name:
        raise EntryError(f"{path}: holds {entry.name!r}; rename one of them")
    return entry


def read_file(path: Path) -> Entry:
    """The entry in a file, checked as `read_entry` does. Raises: EntryError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise EntryError(f"{path}: larger than {MAX_BYTES} bytes; refused")
        data = json.loads(path.read_text())
        entry = Entry.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EntryError(f"{path}: {where}: {first['msg']}; fit it again") from exc
    except (OSError, ValueError) as exc:
        raise EntryError(f"{path}: damaged ({exc}); fit it again") from exc
    if entry.hash != digest(entry.policy):
        raise EntryError(f"{path}: its hash does not match its contents; `sluice policy add` again")
    return entry


def names(folder: Path) -> list[str]:
    """Names of the entries."""
    return sorted(p.stem for p in (folder / "entries").glob("*.json"))


def known(folder: Path) -> str:
    """The names, for a message."""
    return ", ".join(names(folder)) or "none"


def probe(policy: PolicyConfig) -> None:
    """Score a made-up fleet in a hundred states; compiles the kernel on the way.

    Raises: EntryError unless every score is a number.
    """
    import numpy as np

    from domain.columns import estimate_columns, fleet_columns, request_columns, route_table, scores
    from domain.fleet import FleetSpec, ReplicaSpec, Variant
    from policies.factory import build_scorer
    from policies.traits import held, sound

    scorer = build_scorer(policy)
    spec = FleetSpec(
        replicas=tuple(ReplicaSpec(name=f"r{k}", variant="v") for k in range(4)),
        variants=(Variant(name="v", model="m"),),
    )
    fleet, routes = fleet_columns(spec.replicas), route_table(spec).routes
    requests, estimates, out = request_columns(1), estimate_columns(1, 4), scores(1, 4)
    mask, rng = np.ones((1, 4), np.bool_), np.random.default_rng(0)
    for _ in range(100):
        requests.prompt[:], requests.expected[:] = rng.integers(1, 8000), rng.integers(1, 1000)
        requests.ttft[:], requests.tpot[:], requests.e2e[:] = rng.choice([0.5, 5.0, np.inf], 3)
        fleet.running[:] = rng.integers(0, 64, 4)
        fleet.backlog_tokens[:] = rng.integers(0, 4000, 4)
        estimates.p_slo[:], estimates.quality[:] = rng.random((2, 1, 4))
        estimates.ttft[:], estimates.tpot[:] = rng.random((1, 4, 1)), 0.1 * rng.random((1, 4, 1))
        out.route.fill(-np.inf)
        out.hold.fill(-np.inf)
        draws = rng.random((1, 4))
        scorer.kernel(scorer.params, requests, fleet, routes, estimates, mask, draws, 1.0, out)
        if not held(out.route[0], out.hold[0]) and not sound(out.route[0], mask[0]):
            raise EntryError(f"the {policy.kind} policy gives scores that are no numbers; refused")


# ---- who decides


def read_state(folder: Path) -> Registry:
    """The state; an empty one where none was written. Raises: EntryError where it is damaged."""
    path = folder / "state.json"
    try:
        return Registry.model_validate_json(path.read_text())
    except FileNotFoundError:
        return Registry()
    except (OSError, ValueError) as exc:
        raise EntryError(f"{path}: damaged ({exc}); remove it to start from the config") from exc


def change_state(folder: Path, change: Callable[[Registry], Registry]) -> Registry:
    """Read, change and write the state under a lock; the new one."""
    with _locked(folder):
        old = read_state(folder)
        new = change(old)
        if new == old:
            return old
        new = new.model_copy(update={"serial": old.serial + 1, "history": new.history[-HISTORY:]})
        _replace(folder / "state.json", new.model_dump_json(indent=1) + "\n")
        return new


def trial_json(folder: Path, state: Registry) -> str:
    """The plan that a state asks for, as the core takes it; empty if nothing is tried.

    Raises: EntryError for an entry that cannot be used.
    """
    if state.trial is None:
        return ""
    entry = read_entry(folder, state.trial)
    config = TrialConfig(
        name=f"{entry.name}#{state.serial}",
        policy=entry.policy,
        mode="shadow" if state.share is None else "canary",
        share=state.share or 0.0,
        unit=state.unit,
        salt=state.salt,
    )
    return config.model_dump_json()


def shadowed(state: Registry, name: str, at: float) -> Registry:
    """`name` is tried in shadow."""
    step = Step(at=at, verb="shadow", name=name)
    return state.model_copy(
        update={"trial": name, "share": None, "history": (*state.history, step)}
    )


def promoted(state: Registry, at: float, share: float | None = None) -> Registry:
    """The next stage for what is tried, or the share given; after the last it is active.

    Raises: ConfigError if nothing is tried.
    """
    if state.trial is None:
        raise ConfigError("nothing is tried; `sluice policy shadow NAME` first")
    now = state.share or 0.0
    later = [s for s in STAGES if s > now]
    if share is None and not later:
        step = Step(at=at, verb="activate", name=state.trial)
        return state.model_copy(
            update={
                "active": state.trial,
                "previous": (*state.previous, state.active)[-HISTORY:],
                "trial": None,
                "share": None,
                "history": (*state.history, step),
            }
        )
    wanted = later[0] if share is None else share
    step = Step(at=at, verb="promote", name=state.trial, detail=f"{100 * wanted:g} %")
    return state.model_copy(update={"share": wanted, "history": (*state.history, step)})


def rolled_back(state: Registry, at: float, detail: str = "") -> Registry:
    """What is tried is not any more; if nothing is, the policy before the active one decides.

    Raises: ConfigError if there is nothing to go back to.
    """
    if state.trial is not None:
        step = Step(at=at, verb="rollback", name=state.trial, detail=detail)
        return state.model_copy(
            update={"trial": None, "share": None, "history": (*state.history, step)}
        )
    if not state.previous:
        raise ConfigError("nothing is tried and nothing was active before; nothing to go back to")
    step = Step(at=at, verb="rollback", name=state.active, detail=detail)
    return state.model_copy(
        update={
            "active": state.previous[-1],
            "previous": state.previous[:-1],
            "history": (*state.history, step),
        }
    )


def ended(state: Registry, trial: str, at: float, detail: str) -> Registry:
    """A gateway has rolled back the trial of that name; a later one is left alone."""
    name, _, serial = trial.rpartition("#")
    if state.trial != name or str(state.serial) != serial:
        return state
    step = Step(at=at, verb="rolled back", name=name, detail=detail)
    return state.model_copy(
        update={"trial": None, "share": None, "history": (*state.history, step)}
    )


def _path(folder: Path, name: str) -> Path:
    return folder / "entries" / f"{name}.json"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).replace(path)
