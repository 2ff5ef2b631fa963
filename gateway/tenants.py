"""Tenants as operators write them, and which of them an API key belongs to.

Keys are 256 random bits, shown once by `new_key` and kept only as SHA-256: nothing that reads the
config, a log or this process's memory map can use one. (A slow or salted hash protects guessable
secrets; there is nothing to guess here.) A key is looked up by its digest and the digests are then
compared in constant time, also for a key that nobody holds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from domain.errors import ConfigError, Unauthenticated
from domain.request import Quota, Tenant

KEY_PREFIX = "sk-sluice-"
"""How every key begins, so that scanners of source code recognise a leaked one."""

HASH_PREFIX = "sha256:"

_HASH = re.compile(r"^sha256:[0-9a-f]{64}$")
_BEARER = b"bearer "
_NOBODY = bytes(32)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
NotNegative = Annotated[float, Field(ge=0)]


class NewKey(NamedTuple):
    """A key to give away, and the hash to write into the config."""

    key: str
    hash: str


def new_key() -> NewKey:
    """A fresh API key (256 bits) and its hash; the key itself is kept nowhere."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return NewKey(key, hash_of(key))


def hash_of(key: str) -> str:
    """What the config holds in a key's place."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class QuotaSection(_Section):
    """Limits; what is left out is not limited here."""

    requests_per_minute: NotNegative | None = None
    tokens_per_minute: NotNegative | None = None
    burst_tokens: NotNegative | None = None  # depth of the bucket; a minute's tokens if left out
    concurrency: Annotated[int, Field(ge=0)] | None = None
    max_prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    daily_tokens: NotNegative | None = None  # from one UTC midnight to the next
    daily_cost: NotNegative | None = None

    def quota(self) -> Quota:
        """The same as a value of the domain."""
        return Quota(**self.model_dump())


class KeySection(_Section):
    """One API key by its hash; `sluice key` prints both."""

    hash: str
    quota: QuotaSection = QuotaSection()

    @field_validator("hash")
    @classmethod
    def _is_a_hash(cls, value: str) -> str:
        if not _HASH.match(value):
            # The value is not repeated: somebody may have put the key itself here.
            raise ValueError("must be sha256: and 64 hex digits; `sluice key` prints it")
        return value


class TenantSection(_Section):
    """One tenant: its keys, rights, promises and limits."""

    keys: dict[Name, KeySection] = {}
    class_name: Annotated[str | None, Field(alias="class")] = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    models: frozenset[str] | None = None
    quota: QuotaSection = QuotaSection()
    model_quotas: dict[str, QuotaSection] = {}
    isolate_cache: bool = False
    log_text: bool = False

    def tenant(self, name: str) -> Tenant:
        """The tenant as the decision core knows it; no key, no hash."""
        no_limits = Quota()
        keyed = {key: section.quota.quota() for key, section in self.keys.items()}
        return Tenant(
            name=name,
            weight=self.weight,
            class_name=self.class_name,
            models=self.models,
            quota=self.quota.quota(),
            key_quotas={key: quota for key, quota in keyed.items() if quota != no_limits},
            model_quotas={model: s.quota() for model, s in self.model_quotas.items()},
            isolate_cache=self.isolate_cache,
            log_text=self.log_text,
        )


class TenantsFile(_Section):
    """A file of tenants; `configs/tenants.yaml` explains every line."""

    tenants: dict[Name, TenantSection]


class Identity(NamedTuple):
    """Who asks: the tenant, and the name of the key it used (None where the gateway is open).

    `cache_salt` keeps the prompts of a tenant apart in the engines' caches; None where it does not
    ask for that.
    """

    tenant: Tenant
    key: str | None
    cache_salt: str | None = None


class KeyTable:
    """Tenants by the hash of their keys.

    Without tenants the gateway is open: everybody is `anonymous`.
    Raises: ConfigError when one key stands in two places.
    """

    def __init__(self, tenants: Iterable[Tenant], hashes: Mapping[str, Mapping[str, str]]) -> None:
        self.tenants = tuple(tenants)
        self._open = Identity(Tenant(name="anonymous"), None) if not self.tenants else None
        self._holders: dict[bytes, tuple[bytes, Identity]] = {}
        for tenant in self.tenants:
            own = hashes.get(tenant.name, {})
            salt = cache_salt(tenant.name, own.values()) if tenant.isolate_cache else None
            for key, text in own.items():
                digest = bytes.fromhex(text.removeprefix(HASH_PREFIX))
                other = self._holders.get(digest)
                if other is not None:
                    raise ConfigError(
                        f"key {key!r} of {tenant.name!r} is also {other[1].key!r} of "
                        f"{other[1].tenant.name!r}; one key, one tenant"
                    )
                self._holders[digest] = (digest, Identity(tenant, key, salt))

    def identify(self, authorization: bytes | None) -> Identity:
        """Whose key the `Authorization` header carries. Raises: Unauthenticated."""
        if self._open is not None:
            return self._open
        if not authorization or authorization[:7].lower() != _BEARER:
            raise Unauthenticated("no API key: send the header 'Authorization: Bearer <key>'")
        digest = hashlib.sha256(authorization[7:].strip()).digest()
        stored, identity = self._holders.get(digest, (_NOBODY, None))
        if not hmac.compare_digest(stored, digest) or identity is None:
            raise Unauthenticated("unknown API key")
        return identity


class AdminKey:
    """The key that opens `/admin`. With none configured nothing opens it."""

    def __init__(self, text: str | None) -> None:
        if text is not None and not _HASH.match(text):
            raise ConfigError("the admin key's hash must be sha256: and 64 hex digits")
        self._digest = bytes.fromhex(text.removeprefix(HASH_PREFIX)) if text else None

    def opens(self, authorization: bytes | None) -> bool:
        """Whether the `Authorization` header carries it."""
        if self._digest is None or not authorization or authorization[:7].lower() != _BEARER:
            return False
        digest = hashlib.sha256(authorization[7:].strip()).digest()
        return hmac.compare_digest(self._digest, digest)


def cache_salt(tenant: str, hashes: Iterable[str]) -> str:
    """A tenant's salt for the engines' prefix caches: HMAC-SHA-256 of its name, in hex.

    The key is made of the hashes of its API keys, so all gateways of one config send the same, no
    other tenant can send it, and nobody reads the name in an engine's log. With a key that comes or
    goes the salt is another, and the tenant's cached prefixes are cold once.
    """
    secret = hashlib.sha256("\0".join(sorted(hashes)).encode()).digest()
    return hmac.new(secret, f"sluice cache salt\0{tenant}".encode(), hashlib.sha256).hexdigest()


def key_table(sections: Mapping[str, TenantSection]) -> KeyTable:
    """Tenants and their keys as one table."""
    return KeyTable(
        (section.tenant(name) for name, section in sections.items()),
        {name: {k: s.hash for k, s in t.keys.items()} for name, t in sections.items()},
    )


def load_tenants(path: Path) -> dict[str, TenantSection]:
    """The tenants of a YAML file. Raises: ConfigError that names field and remedy, never a
    value.
    """
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TenantsFile.model_validate(data).tenants
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: not YAML: {exc}") from exc
    except ValidationError as exc:
        lines = [
            f"{path}: {'.'.join(map(str, error['loc'])) or 'file'}: {error['msg']}"
            for error in exc.errors(include_input=False, include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from None
