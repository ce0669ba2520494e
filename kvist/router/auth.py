"""Who may do what: clients by their key; administration by another key or, where none is set, on loopback alone."""

from __future__ import annotations

import hmac
import ipaddress
from http import HTTPStatus

from kvist.openai.errors import RequestError
from kvist.http import Request

_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


def require_client(request: Request, api_key: str | None) -> None:
    """Raise RequestError (401) unless the request bears the key, if there is one."""
    if api_key is not None and not _bears(request, api_key):
        raise RequestError(
            HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the API key", code="invalid_api_key"
        )


def require_administrator(request: Request, admin_key: str | None) -> None:
    """Raise RequestError unless the request bears the admin key or, without such a key, comes straight from loopback.

    A proxy on this machine also comes from loopback, and so does a browser that a foreign page has made resolve its
    own name to 127.0.0.1: neither may administer, so forwarded requests and foreign Host names are refused.
    """
    if admin_key is not None:
        if not _bears(request, admin_key):
            raise RequestError(
                HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the admin key", code="invalid_admin_key"
            )
        return
    is_direct = not any(request.header(name) for name in _FORWARDED)
    if not (is_direct and _is_loopback_peer(request) and _is_loopback_host(request)):
        raise RequestError(
            HTTPStatus.FORBIDDEN, "administration is on loopback only, or with --admin-key", code="admin_forbidden"
        )


def _bears(request: Request, key: str) -> bool:
    scheme, _, given = (request.header(b"authorization") or b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())


def _is_loopback_peer(request: Request) -> bool:
    return request.client is not None and _is_loopback(request.client[0])


def _is_loopback_host(request: Request) -> bool:
    host = (request.header(b"host") or b"").decode("latin-1")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name == "localhost" or _is_loopback(name.strip("[]"))


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
