"""Who may do what: clients by their key; administration by another key or, where none is set, on loopback alone."""

from __future__ import annotations

from http import HTTPStatus

from kvist.http import Request
from kvist.http.access import bears, is_direct_from_loopback
from kvist.openai.errors import RequestError


def require_client(request: Request, api_key: str | None, admin_key: str | None) -> None:
    """Raise RequestError (401) unless the request bears the key, if there is one, or that of administrators."""
    if api_key is not None and not bears(request, api_key) and not (admin_key and bears(request, admin_key)):
        raise RequestError(
            HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the API key", code="invalid_api_key"
        )


def is_administrator(request: Request, admin_key: str | None) -> bool:
    """Return whether the request bears the admin key or, where none is set, comes straight from loopback."""
    return is_direct_from_loopback(request) if admin_key is None else bears(request, admin_key)


def require_administrator(request: Request, admin_key: str | None) -> None:
    """Raise RequestError (401, or 403 where no key is set) unless the request is an administrator's."""
    if is_administrator(request, admin_key):
        return
    what = f"{request.method} {request.path} is for administrators"
    if admin_key is not None:
        message = f"{what}: authorization: expected 'Bearer' and the admin key"
        raise RequestError(HTTPStatus.UNAUTHORIZED, message, code="invalid_admin_key")
    raise RequestError(HTTPStatus.FORBIDDEN, f"{what}: on loopback only, or with --admin-key", code="admin_forbidden")
