"""Who asks: the bearer of a key, or somebody on this very machine."""

from __future__ import annotations

import hmac

from kvist.http.request import Request
from kvist.networks import is_loopback

_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})


def bears(request: Request, key: str) -> bool:
    """Return whether the request's bearer token is the key; takes the same time for every wrong one."""
    scheme, _, given = (request.header(b"authorization") or b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())


def is_direct_from_loopback(request: Request) -> bool:
    """Return whether the request comes straight from loopback and knows it.

    A proxy on this machine also comes from loopback, and so does a browser that a foreign page has made resolve its
    own name to 127.0.0.1: forwarded requests and foreign Host names do not count.
    """
    if request.client is None or not is_loopback(request.client[0]):
        return False
    return _FORWARDED.isdisjoint([name for name, _ in request.headers]) and _is_loopback_host(request)


def _is_loopback_host(request: Request) -> bool:
    host = (request.header(b"host") or b"").decode("latin-1")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name == "localhost" or is_loopback(name.strip("[]"))
