"""The root settings: one YAML file, then the environment for secrets.

Line numbers are kept, so that every complaint says where, what and what to do instead.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from domain.errors import ConfigError
from domain.request import AUTO
from gateway.config import (
    BreakerConfig,
    ClassConfig,
    LocalReplicaConfig,
    LogsConfig,
    MemoryStoreConfig,
    ModelConfig,
    MonitorConfig,
    ReplicaConfig,
    Section,
    ServerConfig,
    StoreConfig,
    TimeoutsConfig,
)
from gateway.tenants import Name, TenantSection, load_tenants
from policies.config import ElasticConfig, MarginalPolicy, PolicyConfig
from predictors.config import BaselineConfig, EstimatorConfig

Path_ = tuple[str | int, ...]


class Settings(Section):
    """Everything that `sluice serve` reads."""

    server: ServerConfig = ServerConfig()
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]
    fleet: Annotated[tuple[ReplicaConfig, ...], Field(min_length=1)]
    classes: dict[str, ClassConfig] = Field(default={"standard": ClassConfig()})
    default_class: str = "standard"
    tenants: dict[Name, TenantSection] = Field(default={})
    tenants_file: Path | None = None  # more of them, in a file of their own; beside this one
    policy: PolicyConfig = MarginalPolicy()
    policy_registry: Path | None = None  # folder of `sluice policy`; its active entry overrides
    elastic: ElasticConfig | None = None  # what the fleet should be, on /admin/plan; None: not told
    predictors: EstimatorConfig = BaselineConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    monitor: MonitorConfig = MonitorConfig()
    breaker: BreakerConfig = BreakerConfig()
    store: StoreConfig = MemoryStoreConfig()
    logs: LogsConfig = LogsConfig()
    local_cache: Path | None = None  # model files of local replicas; None: ~/.cache/sluice

    @property
    def local_replicas(self) -> list[LocalReplicaConfig]:
        """Replicas that the gateway runs itself."""
        return [r for r in self.fleet if r.kind == "local"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a config file."""

    file: str
    line: int
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.where}: {self.message}"


class BadConfig(ConfigError):
    """A file that cannot be served, with everything that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def load(path: Path) -> Settings:
    """The settings in a YAML file. Raises: BadConfig with every problem found."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise BadConfig(
            [Problem(file=str(path), line=0, where="file", message=exc.strerror or str(exc))]
        ) from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        message = f"not UTF-8: byte 0x{exc.object[exc.start]:02x}; save the file as UTF-8"
        raise BadConfig(
            [Problem(file=str(path), line=line, where="file", message=message)]
        ) from exc
    settings = parse(text, str(path))
    if settings.tenants_file is None:
        return settings
    more = load_tenants(path.parent / settings.tenants_file)
    joined = settings.model_copy(update={"tenants": settings.tenants | more})
    problems = [
        Problem(file=str(settings.tenants_file), line=0, where=_dotted(where), message=message)
        for where, message in contradictions(joined)
    ]
    if problems:
        raise BadConfig(problems)
    return joined


def parse(text: str, file: str) -> Settings:
    """The settings in a YAML text; `file` names it in messages. Raises: BadConfig."""
    try:
        data, lines = _read(text)
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark is not None else 0
        message = f"not YAML: {exc.problem}"
        raise BadConfig([Problem(file=file, line=line, where="file", message=message)]) from exc
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        message = f"not YAML: {exc.reason}: {text[exc.position]!r}"
        raise BadConfig([Problem(file=file, line=line, where="file", message=message)]) from exc
    except RecursionError as exc:
        message = "not YAML: nested too deeply"
        raise BadConfig([Problem(file=file, line=1, where="file", message=message)]) from exc

    def problem(where: Path_, message: str) -> Problem:
        return Problem(
            file=file, line=_line(lines, where), where=_dotted(where) or "file", message=message
        )

    try:
        settings = Settings.model_validate({} if data is None else data)
    except ValidationError as exc:
        found = exc.errors()
        inner = {e["loc"][: len(e["loc"]) - 1 - i] for e in found for i in range(len(e["loc"]))}
        raise BadConfig(
            # a list that is too short because its items are bad is no news
            [problem(*_complaint(e)) for e in found if e["loc"] not in inner]
        ) from exc
    problems = [problem(where, message) for where, message in contradictions(settings)]
    if problems:
        raise BadConfig(problems)
    return settings


def contradictions(settings: Settings) -> Iterator[tuple[Path_, str]]:
    """Names that point nowhere and names used twice: where, and what is wrong."""
    owners: dict[str, str] = {}
    for model, config in settings.models.items():
        if model == AUTO:
            yield ("models", model), f"{AUTO!r} is reserved: it stands for every model"
        for variant in config.variants:
            if variant in owners:
                message = f"variant {variant!r} stands under {owners[variant]!r} too; rename one"
                yield ("models", model, "variants", variant), message
            owners[variant] = model
    seen: set[str] = set()
    for i, replica in enumerate(settings.fleet):
        if replica.variant not in owners:
            yield ("fleet", i, "variant"), _unknown("variant", replica.variant, owners)
        if replica.name in seen:
            yield ("fleet", i, "name"), f"two replicas are called {replica.name!r}; rename one"
        seen.add(replica.name)
    served = {replica.variant for replica in settings.fleet}
    for variant, model in owners.items():
        if variant not in served:
            message = f"no replica serves {variant!r}; add one under `fleet` or drop the variant"
            yield ("models", model, "variants", variant), message
    if settings.default_class not in settings.classes:
        unknown = _unknown("class", settings.default_class, settings.classes)
        yield ("default_class",), unknown
    keys: dict[str, str] = {}
    for name, tenant in settings.tenants.items():
        if tenant.class_name is not None and tenant.class_name not in settings.classes:
            unknown = _unknown("class", tenant.class_name, settings.classes)
            yield ("tenants", name, "class"), unknown
        for model in sorted(tenant.models or ()):
            if model not in settings.models:
                yield ("tenants", name, "models"), _unknown("model", model, settings.models)
        if not tenant.keys:
            yield ("tenants", name), "no key opens this tenant; `sluice key` makes one"
        for key, section in tenant.keys.items():
            if section.hash in keys:
                message = f"this key opens {keys[section.hash]!r} too; one key, one tenant"
                yield ("tenants", name, "keys", key), message
            keys[section.hash] = name


def _unknown(kind: str, value: str, known: Any) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {value!r}; {hint}known: {', '.join(names)}"


# ---- pydantic's complaints, with the remedy


def _complaint(error: Any) -> tuple[Path_, str]:
    """Where, and what is wrong, of one pydantic error."""
    loc: Path_ = error["loc"]
    where = _untagged(loc)
    value = error.get("input")
    match error["type"]:
        case "extra_forbidden":
            key = str(where[-1])
            known = _keys_at(loc[:-1])
            return where, _unknown("key", key, known) if known else f"unknown key {key!r}"
        case "missing":
            return where, "is required and missing"
        case "union_tag_invalid":
            known = [tag.strip(" '") for tag in error["ctx"]["expected_tags"].split(",")]
            return (*where, "kind"), _unknown("kind", str(error["ctx"]["tag"]), known)
        case "union_tag_not_found":
            return (*where, "kind"), "is required and missing; it says which kind this is"
        case _ if where[-1:] == ("hash",):
            return where, error["msg"]  # the value may be a key
        case "value_error" if where[-1:] == ("url",):
            return where, str(error["ctx"]["error"])  # the value may hold a password
        case _:
            return where, f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {reprlib.repr(value)}"


def _untagged(loc: Path_) -> Path_:
    """A path of pydantic's without the tags of unions that it names on the way."""
    root = Settings.model_json_schema()
    node: dict[str, Any] = root
    where: list[str | int] = []
    for part in loc:
        node = _resolved(node, root)
        if "oneOf" not in node:
            where.append(part)
        node = _step(node, part, root)
    return tuple(where)


def _keys_at(loc: Path_) -> list[str]:
    """Keys that a section takes, from the JSON Schema; empty where anything goes."""
    root = Settings.model_json_schema()
    node = root
    for part in loc:
        node = _step(_resolved(node, root), part, root)
    return sorted(_resolved(node, root).get("properties", {}))


def _step(node: dict[str, Any], part: str | int, root: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {}
    if "oneOf" in node:
        mapping = node.get("discriminator", {}).get("mapping", {})
        return {"$ref": mapping[part]} if part in mapping else empty
    for option in node.get("anyOf", ()):
        found = _step(_resolved(option, root), part, root)
        if found:
            return found
    if isinstance(part, int):
        items: dict[str, Any] = node.get("items", empty)
        return items
    inner: dict[str, Any] = node.get("properties", {}).get(part) or empty
    if inner:
        return inner
    more = node.get("additionalProperties")
    return more if isinstance(more, dict) else empty


def _resolved(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = root["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


# ---- YAML with line numbers


class _Loader(yaml.SafeLoader):
    """Keeps the line of every value and refuses keys that stand twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[Path_, int] = {}

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        self._walk(node, ())
        return self.construct_document(node)

    def _walk(self, node: yaml.Node, where: Path_, above: tuple[yaml.Node, ...] = ()) -> None:
        if node in above:
            raise yaml.MarkedYAMLError(
                problem="an anchor holds itself", problem_mark=node.start_mark
            )
        above = (*above, node)
        self.lines.setdefault(where, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {name!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add(name)
                self.lines[*where, name] = key.start_mark.line + 1
                self._walk(value, (*where, name), above)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                self._walk(value, (*where, i), above)


def _read(text: str) -> tuple[Any, dict[Path_, int]]:
    """The data in a YAML text, and the line of every value. Raises: YAMLError, RecursionError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data(), loader.lines
    finally:
        loader.dispose()


def _line(lines: dict[Path_, int], where: Path_) -> int:
    """The line of a value, or of the nearest thing around it."""
    while where not in lines and where:
        where = where[:-1]
    return lines.get(where, 1)


def _dotted(where: Path_) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
