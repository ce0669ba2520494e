"""HTTP requests of commands to services."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from kvist.cli._settings import SECRET_PLACES, resolve_secret
from kvist.errors import InvalidValueError, KvistError

_TIMEOUT_S = 30.0


def add_admin_key(parser: argparse.ArgumentParser) -> None:
    """Declare the flag for the router's administration key."""
    text = f"the router's admin key{SECRET_PLACES} (default: $KVIST_ADMIN_KEY)"
    parser.add_argument("--admin-key", metavar="KEY", help=text)


def ask_router(url: str, path: str, key: str | None, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Return what a router, or one with this live page, answers to administrators; raises KvistError otherwise."""
    if not url.startswith(("http://", "https://")):
        raise InvalidValueError("URL", url, "a router's, as http://127.0.0.1:30000")
    key = os.environ.get("KVIST_ADMIN_KEY") if key is None else resolve_secret("admin_key", key)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return fetch(url.rstrip("/").removesuffix("/ui"), path, headers, timeout_s)


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Raise KvistError where what the router answered lacks a field, as an answer of another version may."""
    try:
        yield
    except KeyError as error:
        reason = f"its answers have no {error}, so its version is another one than this command's"
        raise KvistError(f"{url} cannot be read: {reason}") from error


def fetch(
    url: str, path: str, headers: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S, *, method: str = "GET"
) -> bytes:
    """Return the body of an answer; raises KvistError where the request fails or is refused."""
    try:
        with open_url(Request(f"{url}{path}", headers=headers or {}, method=method), timeout_s) as answer:
            return answer.read()
    except HTTPException as error:
        raise KvistError(f"{url} broke off: {error!r}") from None


def open_url(request: Request, timeout_s: float | None = None) -> HTTPResponse:
    """Return the answer to a request, or an opened file, without any proxy; raises KvistError that names the URL."""
    try:
        answer: HTTPResponse = build_opener(ProxyHandler({})).open(request, timeout=timeout_s)
    except HTTPError as error:
        with error:
            body = error.read(4096).decode("utf-8", "replace")
        raise KvistError(f"{request.full_url} answered {error.code}: {body}") from None
    except OSError as error:  # urllib does not wrap what sockets raise while it waits for an answer
        raise KvistError(f"{request.full_url} cannot be reached: {getattr(error, 'reason', error)}") from None
    return answer
