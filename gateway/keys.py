"""Which tenant a key belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from domain.errors import Unauthenticated
from domain.request import Tenant

_BEARER = b"bearer "


class KeyRing:
    """Tenants by the digest of their keys, so that no comparison leaks a key's bytes.

    Without tenants the gateway is open: everybody is `anonymous`.
    """

    def __init__(self, tenants: Sequence[Tenant], keys: Mapping[str, Sequence[str]]) -> None:
        self.anonymous = None if tenants else Tenant(name="anonymous")
        self._by_digest = {
            _digest(key.encode()): tenant for tenant in tenants for key in keys.get(tenant.name, ())
        }

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Everybody who may ask."""
        if self.anonymous is not None:
            return (self.anonymous,)
        return tuple({t.name: t for t in self._by_digest.values()}.values())

    def identify(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant of a request. Raises: Unauthenticated."""
        if self.anonymous is not None:
            return self.anonymous
        value = headers.get(b"authorization", b"")
        if value[:7].lower() != _BEARER:
            raise Unauthenticated("no API key; send it as 'Authorization: Bearer KEY'")
        tenant = self._by_digest.get(_digest(value[7:].strip()))
        if tenant is None:
            raise Unauthenticated("this API key opens nothing; ask whoever runs the gateway")
        return tenant


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()
