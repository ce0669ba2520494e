"""What a tenant may do, as a file of tenants or an authoriser says."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvist.errors import InvalidValueError
from kvist.openai.errors import RequestError
from kvist.openai.requests import Fields
from kvist.router.regret import DEFAULT_TENANT
from kvist.settings import read_struct

Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}$")]


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant and its limits; None is no limit, and all models.

    Tenants of one `group` share caches where those of others are kept apart. `priority` is the best that its requests
    can have, and `share` its part of what is computed while requests of several tenants wait.
    """

    name: Name
    models: frozenset[str] | None = None
    group: Name | None = None
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    prefill_tokens_per_minute: Annotated[float, Meta(gt=0)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    share: Annotated[float, Meta(gt=0)] = 1.0

    def check_models(self, model: str | None, fields: Fields) -> None:
        """Raise RequestError (403) unless the tenant may use this model; without its name it might be any.

        SGLang takes an adapter from another field of the body.
        """
        if self.models is None:
            return
        for name, value in (("model", model), ("lora_path", fields.get("lora_path") or model)):
            if not isinstance(value, str) or value not in self.models:
                message = f"{name}: got {value!r:.200}, expected one of {sorted(self.models)}"
                raise RequestError(HTTPStatus.FORBIDDEN, message, param=name, code="model_not_allowed")


DEFAULT = Tenant(name=DEFAULT_TENANT)
"""The tenant of all clients where no tenants are configured, and of administrators."""
UNRESOLVED = Tenant(name="", models=frozenset())
"""Stands for the tenant of a key that the authoriser has to be asked about; it may do nothing."""


class _Listed(Tenant, frozen=True):
    keys: Annotated[tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...], Meta(min_length=1)]
    """SHA-256 of its keys, in hex."""


class _TenantsFile(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[_Listed]


def read_tenants(path: Path) -> dict[bytes, Tenant]:
    """Return the tenants of a file by the SHA-256 of their keys; raises InvalidValueError that says what is wrong."""
    try:
        listed = read_struct(path, _TenantsFile).tenants
    except OSError as error:
        raise InvalidValueError("tenants", str(path), f"a file that can be read ({error.strerror})") from None
    except ValueError as error:
        raise InvalidValueError("tenants", str(path), f"a list of tenants ({error})") from None
    found: dict[bytes, Tenant] = {}
    names = {DEFAULT.name}
    for tenant in listed:
        if tenant.name in names:
            raise InvalidValueError("tenants.name", tenant.name, f"each name once, and not {DEFAULT.name}")
        names.add(tenant.name)
        for key in tenant.keys:
            if (other := found.setdefault(bytes.fromhex(key), tenant)) is not tenant:
                raise InvalidValueError("tenants.keys", key, f"each key once, and this one is of {other.name}, too")
    return found
